"""A node proves who it is with a certificate of the operator and its own key."""

import pytest

from hfedatm.base.trust.enrolment import EnrolmentError, Identity, read_certificate, verify
from hfedatm.deploy import certificates


@pytest.fixture
def secrets(tmp_path):
    folder = tmp_path / "secrets"
    certificates.make_authority(folder)
    certificates.make_task_key(folder / "station-1")
    for place in (0, 1):
        name = f"station-1-client-{place + 1}"
        certificates.enrol(folder, folder / name, name, "station-1", place)
    return folder


def identity(secrets, name, monkeypatch):
    monkeypatch.setenv("HFEDATM_SECRETS", str(secrets / name))
    found = Identity.load()
    assert found is not None
    return found


def test_a_node_is_who_the_operator_says_it_is(secrets, monkeypatch):
    node = identity(secrets, "station-1-client-2", monkeypatch)
    assert (node.name, node.above, node.place) == ("station-1-client-2", "station-1", 1)
    assert verify(node.certificate, node.sign(b"hello"), b"hello") == "station-1-client-2"


def test_without_secrets_there_is_no_identity(monkeypatch):
    monkeypatch.delenv("HFEDATM_SECRETS", raising=False)
    assert Identity.load() is None


def test_another_nodes_certificate_does_not_go_with_my_key(secrets, monkeypatch):
    victim = identity(secrets, "station-1-client-1", monkeypatch)
    liar = identity(secrets, "station-1-client-2", monkeypatch)
    with pytest.raises(EnrolmentError, match="did not sign"):
        verify(victim.certificate, liar.sign(b"hello"), b"hello")


def test_signed_words_cannot_be_changed(secrets, monkeypatch):
    node = identity(secrets, "station-1-client-1", monkeypatch)
    with pytest.raises(EnrolmentError, match="did not sign"):
        verify(node.certificate, node.sign(b"hello"), b"hullo")


def test_an_authority_of_ones_own_enrols_nobody(secrets, tmp_path, monkeypatch):
    own = tmp_path / "own"
    certificates.make_authority(own)
    certificates.make_task_key(own / "station-1")
    certificates.enrol(own, own / "invented", "invented", "station-1", 7)
    monkeypatch.setenv("HFEDATM_SECRETS", str(secrets / "station-1-client-1"))
    with pytest.raises(EnrolmentError, match="not issued by the operator"):
        read_certificate((own / "invented/node.pem").read_bytes())


@pytest.mark.parametrize("nonsense", [b"", b"-----BEGIN CERTIFICATE-----", b"x" * 10_000])
def test_what_is_no_certificate_is_refused(secrets, monkeypatch, nonsense):
    monkeypatch.setenv("HFEDATM_SECRETS", str(secrets / "station-1-client-1"))
    with pytest.raises(EnrolmentError, match="cannot be used"):
        read_certificate(nonsense)


def test_a_links_certificate_is_no_nodes_certificate(secrets, monkeypatch):
    certificates.make_link_certificate(secrets, secrets / "station-1", ["localhost"])
    monkeypatch.setenv("HFEDATM_SECRETS", str(secrets / "station-1-client-1"))
    with pytest.raises(EnrolmentError, match="not a node's certificate"):
        read_certificate((secrets / "station-1/link.pem").read_bytes())


def test_a_node_that_moves_gets_a_new_certificate_and_keeps_its_key(secrets):
    folder = secrets / "station-1-client-2"
    key = (folder / "node.pub").read_bytes()
    certificates.enrol(secrets, folder, "station-1-client-2", "station-1", 5)
    assert (folder / "node.pub").read_bytes() == key
    ca = (secrets / "ca.pem").read_bytes()
    assert read_certificate((folder / "node.pem").read_bytes(), ca).place == 5
