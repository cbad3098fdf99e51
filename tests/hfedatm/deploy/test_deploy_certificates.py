import os
import socket
import ssl
import stat
import subprocess
import threading

import pytest

from hfedatm.deploy import certificates


@pytest.fixture
def secrets(tmp_path):
    folder = tmp_path / "secrets"
    certificates.make_authority(folder)
    return folder


def handshake(link, trusted, name):
    """Connect to a server that shows `link`'s certificate, trusting `trusted`, as `name`."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(link / "link.pem", link / "link.key")
    client = ssl.create_default_context(cafile=str(trusted))
    near, far = socket.socketpair()

    def answer():
        try:
            server.wrap_socket(far, server_side=True).close()
        except OSError:
            far.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        client.wrap_socket(near, server_hostname=name).close()
    finally:
        near.close()
        thread.join()


def test_a_link_is_trusted_by_its_names_only(secrets):
    certificates.make_link_certificate(secrets, secrets / "server", ["server-link", "127.0.0.1"])
    for name in ("server-link", "127.0.0.1"):
        handshake(secrets / "server", secrets / "server" / "ca.pem", name)
    with pytest.raises(ssl.SSLCertVerificationError, match="[Hh]ostname mismatch"):
        handshake(secrets / "server", secrets / "ca.pem", "station-1-link")


def test_another_authority_is_not_trusted(secrets, tmp_path):
    certificates.make_authority(tmp_path / "other")
    certificates.make_link_certificate(tmp_path / "other", tmp_path / "link", ["server-link"])
    with pytest.raises(ssl.SSLCertVerificationError, match="issuer"):
        handshake(tmp_path / "link", secrets / "ca.pem", "server-link")


def test_private_files_are_the_owners_alone(secrets):
    certificates.make_link_certificate(secrets, secrets / "server", ["server-link"])
    certificates.make_node_key(secrets, secrets / "station-1")
    for path in ("ca.key", "server/link.key", "station-1/node"):
        assert stat.S_IMODE(os.stat(secrets / path).st_mode) == 0o600
    assert not list(secrets.glob("*/ca.key"))


def test_a_node_key_is_what_ssh_keygen_makes(secrets):
    certificates.make_node_key(secrets, secrets / "node")
    derived = subprocess.run(
        ["ssh-keygen", "-y", "-f", secrets / "node" / "node"], capture_output=True, text=True
    )
    if derived.returncode != 0:
        pytest.fail(derived.stderr)
    assert derived.stdout.split()[:2] == (secrets / "node" / "node.pub").read_text().split()[:2]
    assert derived.stdout.startswith("ecdsa-sha2-nistp384 ")


def test_an_authority_is_kept(secrets):
    before = (secrets / "ca.key").read_bytes()
    certificates.make_authority(secrets)
    assert (secrets / "ca.key").read_bytes() == before
