"""jaxdp's accountant in Flower: `DifferentialPrivacyServerSideFixedClipping(..., accountant=)`.

A round's mean is over a fixed number of clients, so that one client takes the place of another and
moves their sum by two clip norms: its epsilon is a proven upper bound for that. (Flower's own
accountant counts one clip norm.)
"""

from flwr.serverapp import PrivacySpent, SamplingMethod

from jaxdp import accounting as acc

REPLACE = acc.Relation.REPLACE_ONE


class JaxdpAccountant:
    def __init__(self, config):
        if config.sampling_method is not SamplingMethod.NO_AMPLIFICATION:
            raise ValueError(f"expected NO_AMPLIFICATION, got {config.sampling_method}")
        self.config, self.releases = config, []  # [noise multiplier, count]

    num_releases = property(lambda self: sum(count for _, count in self.releases))

    def _run(self, *more):
        runs = [acc.Repeated(acc.Gaussian(z), n) for z, n in [*self.releases, *more]]
        return acc.Composed(runs)

    def compose(self, event, count=1):
        self._run(release := [event.noise_multiplier, count])  # refuses what is no count
        self.releases.append(release)

    def get_epsilon(self, delta):
        return acc.epsilon(self._run(), delta, REPLACE).upper

    def get_delta(self, epsilon):
        return acc.delta(self._run(), epsilon, REPLACE).upper

    def get_privacy_spent(self, delta=None):
        delta = self.config.target_delta if delta is None else delta
        return PrivacySpent(self.get_epsilon(delta), delta, self.num_releases, "jaxdp")

    def would_exceed(self, event, max_epsilon=None, count=1):
        limit = self.config.max_epsilon if max_epsilon is None else max_epsilon
        run = self._run([event.noise_multiplier, count])
        return acc.epsilon(run, self.config.target_delta, REPLACE).upper > limit

    def state_dict(self):
        return {"releases": self.releases}

    def load_state_dict(self, state):
        self.releases = [list(release) for release in state["releases"]]
