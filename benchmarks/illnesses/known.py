"""The programs written by those who wrote the diagnosis: ten ill and ten healthy ones."""

from benchmarks.illnesses import known_brok, known_healthy, known_nums, known_rehe

CASES = [*known_healthy.CASES, *known_brok.CASES, *known_nums.CASES, *known_rehe.CASES]
