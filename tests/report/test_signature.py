"""Signatures with real ssh keys: the right key, others, and files that were changed since."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.report.run_cases import worrying
from tests.test_cli import call
from torchfil.report import load, save

pytestmark = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signed run with weights and policy, and a list that trusts Alice."""
    folder = tmp_path_factory.mktemp("signed")
    save(worrying(safe=True), folder / "run.parquet")
    (folder / "model.pt").write_bytes(b"weights")
    (folder / "policy.toml").write_text("max_epsilon = 8\n")
    for name in ("alice", "mallory"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name]
        subprocess.run(command, check=True)
    (folder / "signers").write_text(f"alice@example.org {(folder / 'alice.pub').read_text()}")
    signed = call("sign", folder / "run.parquet", "--key", folder / "alice", *others(folder))
    assert signed.exit_code == 0, signed.output
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(made, tmp_path / "signed"))


def others(folder: Path) -> tuple[str | Path, ...]:
    return "--weights", folder / "model.pt", "--policy", folder / "policy.toml"


def verified(folder: Path, *options: str | Path) -> str:
    """What verify says; its exit code is 1 where it does not hold."""
    found = call(
        "verify",
        folder / "run.parquet",
        "--allowed-signers",
        folder / "signers",
        *(options or others(folder)),
    )
    assert found.exit_code == (1 if found.stdout.startswith("NOT VERIFIED: ") else 0), found.output
    return found.stdout


def test_the_right_key(folder: Path) -> None:
    said = verified(folder)
    assert said.startswith("verified: signed by alice@example.org (ED25519 key SHA256:")
    assert all(name in said for name in ("run.parquet", "model.pt", "policy.toml"))
    found = call(
        "verify",
        folder / "run.parquet",
        "--allowed-signers",
        folder / "signers",
        *others(folder),
        "--json",
    )
    assert [file["role"] for file in json.loads(found.stdout)["files"]] == [
        "run",
        "weights",
        "policy",
    ]

    # all that was signed must be compared, and nothing else
    assert "also signed the policy 'policy.toml'" in verified(
        folder, "--weights", folder / "model.pt"
    )
    (folder / "more.pt").write_bytes(b"more")
    assert "more.pt is not the weights that" in verified(
        folder, *others(folder), "--weights", folder / "more.pt"
    )


@pytest.mark.parametrize(
    ("name", "role"), [("run.parquet", "run"), ("model.pt", "weights"), ("policy.toml", "policy")]
)
def test_a_changed_file(folder: Path, name: str, role: str) -> None:
    """An edited run has a right checksum again, and passes the gate.

    Its signature does not hold.
    """
    if role == "run":
        save(worrying(), folder / name)
        load(folder / name)
    else:
        (folder / name).write_text("max_epsilon = 800\n")
    assert f"{name} is not the {role} that alice@example.org signed" in verified(folder)


def test_another_signature_or_none(folder: Path) -> None:
    """By another key; of another manifest.

    With the same key and bytes, signed as a file or a commit would be; cut.
    """
    place = folder / "run.parquet.sig"
    manifest, begin, signature = place.read_text().partition("-----BEGIN")
    command = ["ssh-keygen", "-Y", "sign", "-f", folder / "alice", "-n", "file"]
    made = subprocess.run(command, input=manifest, capture_output=True, text=True, check=True)
    for text, why in (
        (manifest + made.stdout, "namespace does not match"),
        (manifest.replace('"policy"', '"polic"') + begin + signature, "incorrect signature"),
        ("", ""),
        ("x" * 10, ""),
        (manifest, ""),
    ):
        place.write_text(text)
        said = verified(folder)
        assert said.startswith("NOT VERIFIED")
        assert why in said
    assert (
        call("sign", folder / "run.parquet", "--key", folder / "mallory", *others(folder)).exit_code
        == 0
    )
    assert "is not signed by a key of" in verified(folder)


def names_of(folder: Path, *lines: str) -> str:
    """What verify says where these lines of the list have Alice's key."""
    kind, key, _ = (folder / "alice.pub").read_text().split()
    (folder / "signers").write_bytes(
        "\n".join(f"{line} {kind} {key}" for line in lines).encode("latin-1")
    )
    return verified(folder)


def test_every_name_of_a_key_is_tried(folder: Path) -> None:
    """On one line and on several: the namespaces and times that the list allows differ."""
    git, own = 'alice-git namespaces="git"', 'alice-runs namespaces="torchfil-run"'
    expired, later = 'old valid-before="20200101"', 'new valid-after="20990101"'
    for lines, signer in (
        ((git, own), "alice-runs"),
        ((expired, git, later, "# a comment", "alice"), "alice"),
        (("!alice@home,*@home",), "*@home"),
        (('"alice with a key,b"',), "alice with a key"),
        (("z\xfc",), r"z\udcfc"),
    ):
        assert f"verified: signed by {signer} (ED25519 key SHA256:" in names_of(folder, *lines), (
            lines
        )
    assert "not permitted for use in signature namespace" in names_of(folder, git)
    for lines in ((expired, git, later), ("!alice",), (expired,), (later,)):
        assert names_of(folder, *lines).startswith("NOT VERIFIED: ")


def test_nothing_stands_after_the_signature(folder: Path) -> None:
    place = folder / "run.parquet.sig"
    signed = place.read_bytes()
    begin = signed.index(b"-----BEGIN")
    for more in (b"x", b"\n", b"\0", signed[begin:], signed, b"\xff", b"\n" * 2**20):
        place.write_bytes(signed + more)
        assert "something was added after the signature" in verified(folder)
    place.write_bytes(signed[:begin] + b"\xff" + signed[begin:])
    assert "incorrect signature" in verified(folder)


def test_a_manifest_of_another_form(folder: Path) -> None:
    """Even a trusted signer's: cut, or with a part that is missing, strange or there twice."""
    place = folder / "run.parquet.sig"
    signed = place.read_text()
    manifest = signed.partition("-----BEGIN")[0]
    document = json.loads(manifest)
    crafted: list[Any] = [manifest[:cut] for cut in range(0, len(manifest), 40)]
    odd = (
        None,
        [],
        {},
        [[]],
        {"role": 1},
        0,
        -1e308,
        math.nan,
        math.inf,
        True,
        "",
        "x" * 10**5,
        "\ud800",
    )
    for part in (document, document["files"][0]):
        for name, kept in list(part.items()):
            others = odd[:-3] if name == "name" else odd  # any text may be a name
            for part[name] in others:
                crafted.append(json.dumps(document, indent=1) + "\n")
            del part[name]
            crafted.append(json.dumps(document, indent=1) + "\n")
            part[name] = kept
    crafted += [json.dumps(each) for each in odd]
    crafted += [
        json.dumps(document),
        f"{manifest} ",
        manifest.encode("utf-16"),
        manifest.encode() + b"\xff",
    ]
    crafted += [
        manifest.replace('"role"', '"name": "x", "role"'),
        manifest.replace('"files"', '"files": [], "files"'),
    ]
    crafted += [
        "[" * 10**5,
        '{"files":' * 10**5,
        "9" * 10**4,
        manifest.replace("{", '{"more": 1,', 1),
    ]
    sign = ["ssh-keygen", "-Y", "sign", "-f", folder / "alice", "-n", "torchfil-run"]
    for each in crafted:
        content = each if isinstance(each, bytes) else each.encode()
        place.write_bytes(
            content + subprocess.run(sign, input=content, capture_output=True, check=True).stdout
        )
        said = verified(folder)
        assert any(
            why in said for why in ("that torchfil sign does not write", "is not the run that")
        ), each

    # and unsigned: cut anywhere
    for cut in range(0, len(signed) - 1, 40):
        place.write_text(signed[:cut])
        assert verified(folder).startswith("NOT VERIFIED: ")
