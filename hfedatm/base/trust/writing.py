"""Write a policy file that its owner can read and change."""

from __future__ import annotations

from pathlib import Path

from hfedatm.base.errors import UserError
from hfedatm.base.trust.policy import fields
from hfedatm_files import write_text

GENEROUS = {
    "limits.epochs": "1000",
    "limits.seconds": "86400",
    "limits.memory-mb": "65536",
    "limits.reply-mb": "4096",
}
"""Limits of a new policy, which honest work does not reach."""

HEAD = """\
# What a run may do with this node. Only the owner of the node writes this file: a run that asks for
# more is refused, one that asks for less is obeyed. A key behind '#' shows its default.
#
#   hfedatm policy show      explains what is in force
#   hfedatm policy check     says whether a run would be obeyed
"""


def template() -> str:
    """Return the text of a new policy: every key and its meaning, with generous limits."""
    lines, section = [HEAD], ""
    for name, key, default, meaning in fields():
        if name != section:
            lines.append(f"[{name}]")
            section = name
        chosen = GENEROUS.get(f"{name}.{key}")
        value = f"{key} = {chosen}" if chosen else f"# {key} = {default}"
        lines.append(f"# {meaning}\n{value}\n")
    return "\n".join(lines)


def write(path: Path, text: str = "") -> bool:
    """Write a new policy, or ``text``, unless the file exists; return whether it was written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Everybody may read the policy; only its owner may change it.
        write_text(path, text or template(), mode=0o644, overwrite=False)
    except FileExistsError:
        return False
    except OSError as error:
        raise UserError(f"policy {path}: cannot be written: {error.strerror}") from None
    return True
