"""jaxdp's accountant in pfl, for `GaussianMechanism.from_privacy_accountant(accountant, clip)`.

Of epsilon, delta and noise_parameter give two, and the third is found, proven; or three, and they
are refused unless proven. That is for cohorts which are Poisson samples of the users, as pfl's own
accountants assume; its simulations draw a fixed number of users.
"""

from dataclasses import dataclass

from pfl.privacy import PrivacyAccountant

from jaxdp import accounting as acc


@dataclass
class JaxdpAccountant(PrivacyAccountant):
    def __post_init__(self):
        super().__post_init__()
        if self.mechanism != "gaussian" or self.noise_scale != 1:  # a scale adds less noise
            raise ValueError("jaxdp accounts for mechanism='gaussian' and noise_scale=1")
        probability, rounds = self.sampling_probability, self.num_compositions
        if self.noise_parameter is None:
            self.noise_parameter = acc.calibrate_noise_multiplier(
                self.epsilon, self.delta, probability, rounds
            )
        step = acc.PoissonSampled(acc.Gaussian(self.noise_parameter), probability)
        run = acc.Repeated(step, rounds)
        if self.epsilon is None:
            self.epsilon = acc.epsilon(run, self.delta).upper
        elif self.delta is None:
            self.delta = acc.delta(run, self.epsilon).upper
        elif (proven := acc.epsilon(run, self.delta).upper) > self.epsilon:
            raise ValueError(f"epsilon={self.epsilon} is not proven: {proven} is")
