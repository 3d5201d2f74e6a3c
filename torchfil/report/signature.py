"""Who vouches for a run: a signature with an ssh key over the run file, the released weights and
the policy.

A checksum shows damage and no more: whoever edits a file writes a new one. A signature shows who
vouches for the files, if the keys one trusts come from elsewhere than the files. It does not show
that the numbers are true.

A signature file holds a manifest (JSON: role, name and SHA-256 of each file) and below it what
``ssh-keygen -Y sign`` makes of exactly these bytes in the namespace :data:`NAMESPACE`, so that a
signature made for something else is none here. A manifest in any other form, or with anything after
its signature, is refused: two readers could take it for two things. The run file names the SHA-256
of its part files, which are thereby covered.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchfil.utils.files import check_regular, file_sha256

NAMESPACE = "torchfil-run"
_BEGIN, _END = b"-----BEGIN SSH SIGNATURE-----", b"-----END SSH SIGNATURE-----"
_LARGEST = 2**20  # bytes of a signature file

Files = Mapping[str, Sequence[Path]]  # by role: "run", "policy", "weights"


class SignatureError(ValueError):
    """A signature does not hold: another key, another namespace, or a file that was changed
    since.
    """


@dataclass(frozen=True)
class SignedFile:
    """A file that a signature covers; ``compared``: whether it was there and is the one that was
    signed.
    """

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
    """The content of a signature file over some files, made with an ssh key (private, or public
    where an agent has it).

    Raises:
        SignatureError: ssh-keygen cannot sign with that key.
    """
    manifest = _manifest([(role, path.name, digest) for role, path, digest in _digests(files)])
    made = _ssh_keygen("sign", "-f", str(key), "-n", NAMESPACE, given=manifest)
    if made.returncode or not made.stdout.startswith(_BEGIN):
        raise SignatureError(f"the key {key} cannot be used: {_reason(made)}")
    return (manifest + made.stdout).decode()


def verify(
    signature: Path, allowed_signers: Path, files: Files, *, complete: bool = True
) -> Signature:
    """Check that a trusted key has signed exactly these files.

    Args:
        signature: The signature file.
        allowed_signers: Whom to trust, in the format of ``man ssh-keygen`` (ALLOWED SIGNERS); not
            from the signer.
        files: The files to compare, by role.
        complete: Whether every file that is covered must be among them.

    Raises:
        SignatureError: It does not hold.
        OSError: A file cannot be read.
    """
    check_regular(signature)
    check_regular(allowed_signers)
    # an error names the one that is missing
    with open(signature, "rb") as file, open(allowed_signers, "rb"):
        manifest, begin, armor = file.read(_LARGEST).partition(_BEGIN)
        armor, end, rest = armor.partition(_END)
        if rest + file.read(1) not in (b"", b"\n"):
            raise SignatureError(
                f"{signature} does not hold: something was added after the signature"
            )
    with tempfile.TemporaryDirectory() as folder:
        armored, part = Path(folder) / "signature", Path(folder) / "part"
        armored.write_bytes(begin + armor + end)
        held = _ssh_keygen("find-principals", "-s", str(armored), "-f", str(allowed_signers))
        if held.returncode:
            raise SignatureError(
                f"{signature} is not signed by a key of {allowed_signers}: {_reason(held)}"
            )
        options = "-s", str(armored), "-f", str(allowed_signers), "-n", NAMESPACE
        for signer in _principals(armored, allowed_signers.read_bytes(), part):
            held = _ssh_keygen("verify", *options, "-I", signer, given=manifest)
            if not held.returncode:
                break
        else:
            raise SignatureError(f"{signature} does not hold: {_reason(held)}")

    # only now is the manifest somebody's word
    found = {(role, digest): path for role, path, digest in _digests(files)}
    signed = _listed(manifest)
    if signed is None:
        raise SignatureError(
            f"{signature} does not hold: {signer} signed a manifest that torchfil sign does not "
            "write; have the files signed again"
        )
    covered = [SignedFile(*each, (each[0], each[2]) in found) for each in signed]
    for role, digest in found.keys() - {(each.role, each.sha256) for each in covered}:
        path = found[role, digest]
        raise SignatureError(
            f"{path} is not the {role} that {signer} signed: it was changed, or is another file"
        )
    for each in covered:
        if complete and not each.compared:
            raise SignatureError(
                f"{signer} also signed the {each.role} {each.name!r}, which was not given to "
                "compare"
            )
    key = re.search(r".* with (.*)", held.stdout.decode(errors="replace"))
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Signature(signer, key[1] if key else "unknown key", now, covered)


def _digests(files: Files) -> list[tuple[str, Path, str]]:
    return [(role, path, file_sha256(path)) for role, paths in files.items() for path in paths]


def _manifest(entries: Sequence[tuple[str, str, str]]) -> bytes:
    files = [dict(zip(("role", "name", "sha256"), each, strict=True)) for each in entries]
    return (json.dumps({"namespace": NAMESPACE, "files": files}, indent=1) + "\n").encode()


def _listed(manifest: bytes) -> list[tuple[str, str, str]] | None:
    """Role, name and SHA-256 of each file.

    None unless the bytes are those that :func:`sign` writes of them.
    """
    try:
        files = json.loads(manifest)["files"]
        entries = [(str(each["role"]), str(each["name"]), str(each["sha256"])) for each in files]
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return entries if _manifest(entries) == manifest else None


def _principals(armored: Path, known: bytes, part: Path) -> Iterator[str]:
    """Whom a list of keys names for the key of a signature, for one of them may sign here where
    others may not.

    ssh-keygen finds the first line with the key; for the others it is asked about each line, in the
    file ``part``.
    """
    for lines in (known, *known.splitlines()):
        part.write_bytes(lines)
        found = _ssh_keygen("find-principals", "-s", str(armored), "-f", str(part))
        yield from re.findall("!?([^,\n]+)", os.fsdecode(found.stdout))


def _ssh_keygen(task: str, *options: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise FileNotFoundError(
            "ssh-keygen was not found, which signs and verifies; install OpenSSH 8.2 or later"
        )
    return subprocess.run(
        [program, "-Y", task, *options], input=given, capture_output=True, check=False
    )


def _reason(ended: subprocess.CompletedProcess[bytes]) -> str:
    lines = [
        line
        for line in ended.stderr.decode(errors="replace").splitlines()
        if not line.startswith("Signing data")
    ]
    return lines[0] if lines else "no reason was given"
