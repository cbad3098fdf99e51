"""Check whether this user made a results folder; only then is the code it names imported.

``config.json`` of a run carries an HMAC of its settings under a random key that only this user can
read and that is in no results folder. The HMAC of a folder from elsewhere does not verify; plug-in
code that such a folder names is imported only if the user names it again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfedatm.base.errors import UserError
from hfedatm.base.trust.checking import own_code
from hfedatm.base.trust.policy import Policy
from hfedatm_files import PRIVATE, write_bytes

if TYPE_CHECKING:
    from hfedatm.base.settings import Settings

KEY_BYTES = 32
FIELD = "author"
"""Field of ``config.json`` that holds the HMAC."""


def sign(settings: Mapping[str, Any]) -> str:
    """Return the HMAC of settings; empty if this user cannot keep a key."""
    key = _key(make=True)
    return _mac(key, settings) if key else ""


def require_own(
    config: Mapping[str, Any], settings: Settings, repeated: Iterable[str], cure: str
) -> None:
    """Refuse another author's folder whose settings name plug-in code.

    Parameters
    ----------
    config
        The content of ``config.json``.
    settings
        The settings in it, parsed.
    repeated
        Names that the user has written again and so allows.
    cure
        How to write a name again, with placeholders ``{key}`` and ``{name}``.
    """
    if Policy.current().is_owners:
        return  # a deployed process has its owner's policy
    allowed = {name.strip() for value in repeated for name in str(value).split(",")}
    named = [(key, name) for key, name in own_code(settings) if name not in allowed]
    if not named or verifies(config):
        return
    keys = ", ".join(dict.fromkeys(key for key, _ in named))
    again = " ".join(cure.format(key=key, name=name) for key, name in named)
    raise UserError(
        f"{keys}: this results folder was not made by you here, so the code it names is not "
        f"imported; if you trust that code, name it again: {again}"
    )


def verifies(config: Mapping[str, Any]) -> bool:
    """Return whether this user made the results folder with this ``config.json``."""
    key, mac = _key(make=False), config.get(FIELD)
    if not key or not isinstance(mac, str):
        return False
    return hmac.compare_digest(_mac(key, config["settings"]).encode(), mac.encode())


def _mac(key: bytes, settings: Mapping[str, Any]) -> str:
    text = json.dumps(dict(settings), sort_keys=True, separators=(",", ":"))
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _key(make: bool) -> bytes:
    """Return this user's key; it is made once, and only this user can read it."""
    try:
        home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(home) / "hfedatm/author.key"
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileExistsError):  # a second process uses the key of the first
                new = secrets.token_bytes(KEY_BYTES)
                write_bytes(path, new, mode=PRIVATE, overwrite=False)
        key = path.read_bytes()
    except (OSError, RuntimeError):  # no writable home folder, as in a container
        return b""
    return key if len(key) == KEY_BYTES else b""
