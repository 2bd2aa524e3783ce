"""jaxdp's accountant in Opacus: `PrivacyEngine(accountant="jaxdp")` once this module is imported.

Its epsilon is a proven upper bound for the noise, sampling rates and steps that Opacus tells it,
between data sets that differ by one record, with Poisson sampling (`poisson_sampling=True`).
"""

from opacus.accountants import IAccountant
from opacus.accountants.registry import register_accountant

from jaxdp import accounting as acc


class JaxdpAccountant(IAccountant):
    """Keeps (noise multiplier, sampling rate, steps), as Opacus' accountants and files do."""

    def __init__(self):
        self.history = []

    def step(self, *, noise_multiplier, sample_rate):
        settings, steps = (noise_multiplier, sample_rate), 0
        if self.history and tuple(self.history[-1][:2]) == settings:
            steps = self.history.pop()[2]
        self.history.append((*settings, steps + 1))

    def get_epsilon(self, delta):
        runs = [acc.Repeated(acc.PoissonSampled(acc.Gaussian(z), q), n) for z, q, n in self.history]
        return acc.epsilon(acc.Composed(runs), delta).upper

    def __len__(self):
        return sum(steps for *_, steps in self.history)

    @classmethod
    def mechanism(cls):
        return "jaxdp"


register_accountant(JaxdpAccountant.mechanism(), JaxdpAccountant)
