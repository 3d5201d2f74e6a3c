"""Who vouches for a run: a signature with an ssh key over the run file, the released weights and the policy.

A checksum shows damage and no more: whoever edits a file writes a new one. A signature shows who vouches for the files,
if the keys one trusts come from elsewhere than the files. It does not show that the numbers are true.

A signature file holds a manifest (JSON: role, name and SHA-256 of each file) and below it what ``ssh-keygen -Y sign``
makes of exactly these bytes in the namespace :data:`NAMESPACE`, so that a signature made for something else is none
here. The run file names the SHA-256 of its part files, which are thereby covered.
"""

from __future__ import annotations

import datetime
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchfil.utils.files import check_regular, file_sha256

NAMESPACE = "torchfil-run"
_BEGIN = "-----BEGIN SSH SIGNATURE-----"
_LARGEST = 2**20  # bytes of a signature file

Files = Mapping[str, Sequence[Path]]  # by role: "run", "policy", "weights"


class SignatureError(ValueError):
    """A signature does not hold: another key, another namespace, or a file that was changed since."""


@dataclass(frozen=True)
class SignedFile:
    """A file that a signature covers; ``compared``: whether it was there and is the one that was signed."""

    role: str
    name: str
    sha256: str
    compared: bool


@dataclass(frozen=True)
class Signature:
    """A signature that holds.

    Attributes:
        signer: The name beside the key in the list of trusted keys.
        key: Type and fingerprint.
        verified: When it was verified, in UTC.
        files: What it covers.
    """

    signer: str
    key: str
    verified: str
    files: list[SignedFile]


def sign(files: Files, key: Path) -> str:
    """The content of a signature file over some files, made with an ssh key (private, or public where an agent has it).

    Raises:
        SignatureError: ssh-keygen cannot sign with that key.
    """
    entries = [{"role": role, "name": path.name, "sha256": digest} for role, path, digest in _digests(files)]
    manifest = json.dumps({"namespace": NAMESPACE, "files": entries}, indent=1) + "\n"
    made = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, given=manifest)
    if made.returncode or not made.stdout.startswith(_BEGIN):
        raise SignatureError(f"the key {key} cannot be used: {_reason(made)}")
    return manifest + made.stdout


def verify(signature: Path, allowed_signers: Path, files: Files, *, complete: bool = True) -> Signature:
    """Check that a trusted key has signed exactly these files.

    Args:
        signature: The signature file.
        allowed_signers: Whom to trust, in the format of ``man ssh-keygen`` (ALLOWED SIGNERS); not from the signer.
        files: The files to compare, by role.
        complete: Whether every file that is covered must be among them.

    Raises:
        SignatureError: It does not hold.
        OSError: A file cannot be read.
    """
    check_regular(signature)
    check_regular(allowed_signers)
    with open(signature, "rb") as file, open(allowed_signers, "rb"):  # an error names the one that is missing
        content = file.read(_LARGEST).decode(errors="replace")
    manifest, mark, armor = content.partition(_BEGIN)
    with tempfile.TemporaryDirectory() as folder:
        armored, trusted = str(Path(folder) / "signature"), ("-f", str(allowed_signers))
        Path(armored).write_text(mark + armor, encoding="utf-8")
        names = _ssh_keygen("find-principals", "-s", armored, *trusted)
        signer = names.stdout.partition("\n")[0]
        if names.returncode or not signer:
            raise SignatureError(f"{signature} is not signed by a key of {allowed_signers}: {_reason(names)}")
        held = _ssh_keygen("verify", "-s", armored, *trusted, "-I", signer, "-n", NAMESPACE, given=manifest)
    if held.returncode:
        raise SignatureError(f"{signature} does not hold: {_reason(held)}")

    # only now is the manifest somebody's word
    found = {(role, digest): path for role, path, digest in _digests(files)}
    signed = [(entry["role"], entry["name"], entry["sha256"]) for entry in json.loads(manifest)["files"]]
    covered = [SignedFile(*each, (each[0], each[2]) in found) for each in signed]
    for role, digest in found.keys() - {(each.role, each.sha256) for each in covered}:
        path = found[role, digest]
        raise SignatureError(f"{path} is not the {role} that {signer} signed: it was changed, or is another file")
    for each in covered:
        if complete and not each.compared:
            raise SignatureError(f"{signer} also signed the {each.role} {each.name!r}, which was not given to compare")
    key = re.search(r" with (.*)", held.stdout)
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Signature(signer, key[1] if key else "unknown key", now, covered)


def _digests(files: Files) -> list[tuple[str, Path, str]]:
    return [(role, path, file_sha256(path)) for role, paths in files.items() for path in paths]


def _ssh_keygen(task: str, *options: str, given: str = "") -> subprocess.CompletedProcess[str]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise FileNotFoundError("ssh-keygen was not found, which signs and verifies; install OpenSSH 8.2 or later")
    return subprocess.run([program, "-Y", task, *options], input=given, capture_output=True, text=True, check=False)


def _reason(ended: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("Signing data")]
    return lines[0] if lines else "no reason was given"
