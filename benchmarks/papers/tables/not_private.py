"""SA-DPSGD's column "nonDP", and PIGDO's networks, trained without privacy."""

from benchmarks.papers import not_private
from benchmarks.papers.tables import rows
from benchmarks.papers.tables.page import Page, Section, TextTable
from benchmarks.papers.tables.rows import Results
from jaxdp.data.specs import spec

NAMES = tuple(not_private.ROWS)


def page(results: Results) -> Page:
    """One table."""
    kept = results.read(not_private.FILE) or []
    body = []
    for name, row in not_private.ROWS.items():
        lines = [line for line in kept if line["name"] == name]
        network = "784-1000-10 (PIGDO)" if row.pigdo else "Table 1's"
        first = [spec(row.dataset).title, network, row.activation, f"{row.paper:.2f} %"]
        if not lines:
            minutes = not_private.MINUTES.get(row.dataset)
            told = rows.MISSING + (f": {minutes} min" if minutes else "")
            body.append([*first, f"`{name}`", told, "", str(row.epochs), "", ""])
            continue
        found = rows.mean_and_spread([line["test_accuracy"] for line in lines])
        seconds = f"{max(line['seconds'] for line in lines):.0f}"
        machine = ", ".join(dict.fromkeys(line["machine"] for line in lines))
        body.append([*first, f"`{name}`", *found, str(row.epochs), seconds, machine])
    headers = (
        "data set",
        "network",
        "activation",
        "paper",
        "row",
        "test accuracy",
        "runs",
        "epochs",
        "seconds",
        "machine",
    )
    return Page(
        "Without privacy: SA-DPSGD's column nonDP, and PIGDO's networks",
        (
            f"The networks of [Table 1](table1.md), trained by SGD (rate {not_private.RATE:g}, "
            f"momentum {not_private.MOMENTUM:g}, batches of {not_private.BATCH}, no clipping or "
            "noise): **no guarantee at all**. "
            "The paper states neither optimizer nor epochs for its column. Accuracy after the last "
            "epoch, of all test examples; mean ± standard deviation where there are several runs. "
            f"PIGDO's network: Adam (rate {not_private.ADAM_RATE:g}, batches of "
            f"{not_private.ADAM_BATCH}), for as many epochs as its Section 5.1 gives. "
            "Machines were shared with other work: seconds say little.",
        ),
        (),
        (Section("Ordinary training", (), TextTable(headers, body)),),
        "jaxdp reproduce not_private",
    )
