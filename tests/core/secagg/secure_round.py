"""A station and its clients in a secure sum, stage by stage."""

import hashlib

import numpy as np

from hfedatm_core.secagg import Aggregator, FixedPoint, SecureClient

SESSION = b"run-1/station-2/round-3"
STEP = "run/3.1/train"


def reload(client: SecureClient) -> SecureClient:
    """Go on in another process, as a deployed client does between messages."""
    return SecureClient.from_bytes(client.to_bytes())


class Badge:
    """A proof of identity of tests: a name, and a hash that only the operator's secret makes."""

    def __init__(self, name: str, operator: bytes = b"operator"):
        self.certificate = name.encode()
        self._operator = operator

    def sign(self, data: bytes) -> bytes:
        return hashlib.sha256(self._operator + self.certificate + data).digest()


def verify(certificate: bytes, signature: bytes, data: bytes) -> str:
    name = certificate.decode()
    if signature != Badge(name).sign(data):
        raise ValueError(f"{name!r} is not enrolled")
    return name


class Round:
    """A station and its clients, with the stages one by one."""

    def __init__(
        self, ids, size=50, threshold=None, fixed_point=None, seed=0, badges=None, session=SESSION
    ):
        generator = np.random.default_rng(seed)
        self.vectors = {i: generator.normal(scale=3.0, size=size) for i in ids}
        self.fixed_point = fixed_point or FixedPoint()
        self.badges = badges or {}
        self.verify = verify if badges else None
        self.station = Aggregator(
            session,
            size,
            step=STEP,
            threshold=threshold,
            fixed_point=self.fixed_point,
            verify=self.verify,
        )
        self.clients = {i: SecureClient(i, session, step=STEP, threshold=threshold) for i in ids}

    def _each(self, ids):
        for i in ids:
            self.clients[i] = reload(self.clients[i])
            yield i, self.clients[i]

    def advertise(self):
        for i, client in self.clients.items():
            self.station.advertised(i, client.advertise(self.badges.get(i)))
        return self

    def share(self, ids=None):
        directory = self.station.directory()
        for i, client in self._each(self.clients if ids is None else ids):
            self.station.shared(i, client.share(directory, self.verify))
        return self.check(ids)

    def check(self, ids=None):
        for i, client in self._each(self.clients if ids is None else ids):
            self.station.checked(i, client.check(self.station.inbox(i)))
        return self

    def mask(self, ids=None):
        chosen = self.station.participants()
        for i, client in self._each(chosen if ids is None else ids):
            vector = client.mask(chosen, self.vectors[i], self.fixed_point)
            self.station.masked(i, vector)
        return self

    def sign(self, ids=None):
        survivors = self.station.survivors()
        for i, client in self._each(survivors if ids is None else ids):
            self.station.signed(i, client.sign(survivors))
        return self

    def reveal(self, ids=None):
        if all(self.clients[i].stage == "sign" for i in self.station.survivors()):
            self.sign()
        signatures = self.station.signatures()
        for i, client in self._each(self.station.survivors() if ids is None else ids):
            self.station.revealed(i, client.reveal(signatures))
        return self

    def check_sum(self, delivered):
        exact = sum(self.vectors[i] for i in delivered)
        tolerance = len(delivered) * 2.0 ** (-self.fixed_point.fraction - 1)
        assert np.abs(self.station.result() - exact).max() <= tolerance * (1 + 1e-6)
