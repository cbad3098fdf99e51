"""Which keys a SuperLink admits, and the numbers that it has given their nodes.

Flower lists its nodes by number alone. So the number that a key gets when it is registered is noted
here, under the key's fingerprint: it is needed to withdraw the key again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from hfedatm.base.trust.revocation import fingerprint_of
from hfedatm.deploy import flower
from hfedatm_files import write_text

_FILE = "nodes.json"
_writing = Lock()  # keys are registered in several threads


@dataclass(frozen=True)
class Registration:
    """The registered keys of one SuperLink.

    Attributes
    ----------
    link
        Its name in Flower's configuration.
    home
        The operator's Flower home; the numbers are noted there.
    """

    link: str
    home: Path

    def register(self, public_key: Path) -> None:
        """Admit the node that holds the private key; admitting it again is no error."""
        number = flower.register_node(public_key, self.link, self.home)
        if number:
            self._note(fingerprint_of(public_key), number)

    def withdraw(self, fingerprint: str) -> bool:
        """Forget a key, so that no message waits for its node; return whether it was known.

        The gateway refuses the node in any case. A key whose number is not known, because an older
        version registered it, only makes the link wait until it misses the node.
        """
        number = self.numbers().get(fingerprint)
        if number is None:
            return False
        flower.unregister_node(number, self.link, self.home)
        self._note(fingerprint, None)
        return True

    def numbers(self) -> dict[str, int]:
        """Return the noted numbers by fingerprint."""
        found: dict[str, int] = self._all().get(self.link, {})
        return found

    def _all(self) -> dict[str, dict[str, int]]:
        file = self.home / _FILE
        noted: dict[str, dict[str, int]] = json.loads(file.read_text()) if file.exists() else {}
        return noted

    def _note(self, fingerprint: str, number: int | None) -> None:
        with _writing:
            known = self._all()
            own = known.setdefault(self.link, {})
            if number is None:
                own.pop(fingerprint, None)
            else:
                own[fingerprint] = number
            write_text(self.home / _FILE, json.dumps(known, indent=1) + "\n")
