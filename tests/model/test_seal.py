"""Sealed secrets open only with their key and their kid."""

import pytest

from flowfabric.model.errors import EngineError
from flowfabric.model.key import SECRET_BYTES
from flowfabric.model.seal import Seals, is_sealed
from model.cases import for_each

SECRET = bytes(range(SECRET_BYTES))
ONE, OTHER = b"1" * 32, b"2" * 32


def refuses(seals: Seals, kid: str, stored: bytes) -> bool:
    with pytest.raises(EngineError) as refusal:
        seals.open(kid, stored)
    assert SECRET.hex() not in str(refusal.value)
    return refusal.value.code == "corruption" and "FF_SECRET_KEY" in str(refusal.value)


def test_without_a_key_secrets_are_stored_in_plain() -> None:
    assert Seals().seal("k1", SECRET) == SECRET
    assert Seals().open("k1", SECRET) == SECRET
    assert not Seals().needs_sealing("k1", SECRET)


def test_a_sealed_secret_opens_only_with_its_key_and_kid() -> None:
    sealed = Seals([ONE]).seal("k1", SECRET)
    assert is_sealed(sealed)
    assert SECRET not in sealed
    assert Seals([ONE]).open("k1", sealed) == SECRET
    assert refuses(Seals([OTHER]), "k1", sealed)
    assert refuses(Seals(), "k1", sealed)
    assert refuses(Seals([ONE]), "k2", sealed)


def test_a_sealed_secret_with_any_byte_changed_does_not_open() -> None:
    sealed = Seals([ONE]).seal("k1", SECRET)
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1
        assert refuses(Seals([ONE]), "k1", bytes(changed))


def test_sealing_twice_produces_different_bytes() -> None:
    assert len({Seals([ONE]).seal("k1", SECRET) for _ in range(100)}) == 100


def test_a_plain_secret_with_the_sealed_prefix_is_recognised_by_its_length() -> None:
    secret = b"\x01" + SECRET[1:]
    assert not is_sealed(secret)
    assert Seals([ONE]).open("k1", secret) == secret


@for_each("size", [0, 1, 31, 33, 60, 62])
def test_bytes_of_another_length_do_not_open(size: int) -> None:
    assert refuses(Seals([ONE]), "k1", b"\x01" * size)
    assert refuses(Seals(), "k1", b"\x01" * size)


def test_the_first_key_seals_and_the_others_open() -> None:
    old, both = Seals([ONE]).seal("k1", SECRET), Seals([OTHER, ONE])
    assert both.open("k1", old) == SECRET
    assert both.needs_sealing("k1", old)
    assert both.needs_sealing("k1", SECRET)
    new = both.seal("k1", SECRET)
    assert not both.needs_sealing("k1", new)
    assert Seals([OTHER]).open("k1", new) == SECRET
