import copy
import dataclasses
import json
import logging
import pickle
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.errors import EngineError, InvalidInputError
from flowfabric.model.ids import ExecutionId, WaitpointId, format_execution_id
from flowfabric.model.key import SigningKey
from flowfabric.model.token import ParsedToken, RingKey, WaitpointToken, parse_token, sign_token, verify_token
from model.cases import for_each

NOW = 1_000_000
EXECUTION = ExecutionId("{fp:7}:11111111-1111-4111-8111-111111111111")
WAITPOINT = WaitpointId(uuid.UUID("22222222-2222-4222-8222-222222222222"))
KEY = SigningKey(kid="k1", secret=b"\xab" * 32)
OTHER = SigningKey(kid="k2", secret=b"\xcd" * 32)
DIGEST = "9c61984969b7cf39e936a7504b69f19001cff0e5ad81e3780c166ef730684f62"
TOKEN = sign_token(KEY, EXECUTION, WAITPOINT)
RING = {"k1": RingKey(key=KEY, is_current=True)}


def code(
    presented: Any, *, ring: dict[str, RingKey] = RING, stored: WaitpointToken | None = TOKEN, **place: Any
) -> str | None:
    """Return the code that a token is rejected with, or None."""
    try:
        verify_token(
            presented,
            ring,
            stored=stored,
            **{"execution_id": EXECUTION, "waitpoint_id": WAITPOINT, "now": NOW, **place},
        )
    except EngineError as refused:
        return refused.code
    return None


def test_tokens_equal_the_test_vectors() -> None:
    assert TOKEN.reveal() == f"k1:{DIGEST}"
    other = sign_token(
        SigningKey(kid="kid-b", secret=bytes(32)),
        ExecutionId("{fp:0}:00000000-0000-4000-8000-000000000001"),
        WaitpointId(uuid.UUID("00000000-0000-4000-8000-000000000002")),
    )
    assert other.reveal() == "kid-b:1446ab14e3f5b98600d1eb2acb687f015511928ec630cee6f9b14480ac4efd17"


def test_a_token_is_accepted_as_text_and_as_token() -> None:
    assert code(TOKEN) is None
    assert code(TOKEN.reveal()) is None


@for_each("presented", [None, "", WaitpointToken("")])
def test_none_and_empty_tokens_are_missing(presented: Any) -> None:
    assert code(presented) == code(presented, ring={}) == "missing_token"


@for_each(
    "presented",
    [
        "no colon",
        DIGEST,
        f":{DIGEST}",
        "k1:",
        ":",
        f"k1:{DIGEST[:-1]}",
        f"k1:{DIGEST}0",
        f"k1:{DIGEST[:-1]}g",
        f"k1:{DIGEST}\n",
        f"k1:x:{DIGEST}",
        f"k1\0:{DIGEST}",
        f"\ud800:{DIGEST}",
        f"{'k' * 257}:{DIGEST}",
        f"k1:{'٣' * 64}",
        5,
        b"k1:" + DIGEST.encode(),
    ],
)
def test_a_malformed_token_is_invalid_even_without_keys(presented: Any) -> None:
    assert code(presented) == code(presented, ring={}) == "invalid_token"


def test_a_token_is_parsed_into_kid_and_digest() -> None:
    assert parse_token(TOKEN) == parse_token(TOKEN.reveal()) == ParsedToken(kid="k1", digest=DIGEST)


def test_without_keys_nothing_can_be_verified() -> None:
    assert code(TOKEN, ring={}) == "hmac_secret_not_initialized"


@for_each(
    "expires_at, answer",
    [(NOW + 1, None), (NOW, None), (NOW - 1, "token_expired"), (0, "token_expired"), (None, "token_expired")],
)
def test_a_retired_key_verifies_until_it_expires(expires_at: int | None, answer: str | None) -> None:
    ring = {
        "k1": RingKey(key=KEY, is_current=False, expires_at=expires_at),
        "k2": RingKey(key=OTHER, is_current=True),
    }
    assert code(TOKEN, ring=ring) == answer


def test_a_token_of_an_unknown_kid_is_invalid() -> None:
    assert code(TOKEN, ring={"k2": RingKey(key=OTHER, is_current=True)}) == "invalid_token"


def test_a_token_is_valid_only_for_its_waitpoint_and_execution() -> None:
    elsewhere = ExecutionId(EXECUTION.replace("{fp:7}", "{fp:8}"))
    assert code(TOKEN, waitpoint_id=WaitpointId(uuid.uuid4())) == "invalid_token"
    assert code(TOKEN, execution_id=elsewhere) == "invalid_token"
    assert code(sign_token(KEY, elsewhere, WAITPOINT)) == "invalid_token"


def test_a_token_signed_by_a_newer_key_than_the_stored_one_is_invalid() -> None:
    newer = sign_token(OTHER, EXECUTION, WAITPOINT)
    ring = {**RING, "k2": RingKey(key=OTHER, is_current=True)}
    assert code(newer, ring=ring) == "invalid_token"
    assert code(newer, ring=ring, stored=newer) is None


def test_a_stored_token_with_another_signature_does_not_verify() -> None:
    forged = WaitpointToken(f"k1:{'0' * 64}")
    assert code(forged, stored=forged) == "invalid_token"


def test_an_unknown_waitpoint_rejects_tokens_like_a_wrong_token() -> None:
    assert code(TOKEN, stored=None) == code(f"k1:{'0' * 64}", stored=None) == "invalid_token"


def test_a_digest_is_invalid_under_another_kid() -> None:
    twin = SigningKey(kid="k9", secret=KEY.secret)
    presented = WaitpointToken(f"k9:{DIGEST}")
    assert code(presented, ring={"k9": RingKey(key=twin, is_current=True)}, stored=presented) == "invalid_token"


def test_an_unusable_secret_is_corruption() -> None:
    broken = SigningKey(kid="k1", secret=b"")
    assert code(TOKEN, ring={"k1": RingKey(key=broken, is_current=True)}) == "corruption"
    with pytest.raises(InvalidInputError, match="corruption: the stored secret of kid 'k1' is unusable"):
        sign_token(broken, EXECUTION, WAITPOINT)


places = st.tuples(st.builds(format_execution_id, st.integers(0, 255), st.uuids()), st.uuids().map(WaitpointId))
keys = st.builds(
    SigningKey,
    kid=st.text(st.characters(blacklist_characters=":\0", blacklist_categories=["Cs"]), min_size=1, max_size=20),
    secret=st.binary(min_size=32, max_size=32),
)


@given(keys, places, st.data())
def test_a_token_with_any_character_changed_is_rejected(
    key: SigningKey, place: tuple[ExecutionId, WaitpointId], data: st.DataObject
) -> None:
    token = sign_token(key, *place)
    text = token.reveal()
    ring = {key.kid: RingKey(key=key, is_current=True)}
    asked: Any = {"ring": ring, "stored": token, "execution_id": place[0], "waitpoint_id": place[1]}
    assert code(token, **asked) is None
    at = data.draw(st.integers(0, len(text) - 1))
    changed = data.draw(st.one_of(st.characters(), st.just(text[at].upper())).filter(lambda char: char != text[at]))
    assert code(text[:at] + changed + text[at + 1 :], **asked) == "invalid_token"
    assert code(text[:at] + text[at + 1 :], **asked) == "invalid_token"


@given(keys, places, places)
def test_signing_is_deterministic_and_differs_by_place(key: SigningKey, one: Any, another: Any) -> None:
    assert sign_token(key, *one) == sign_token(key, *one)
    assert (sign_token(key, *one) == sign_token(key, *another)) is (one == another)


def test_a_token_prints_only_its_kid_and_the_length_of_its_digest() -> None:
    assert repr(TOKEN) == "WaitpointToken(k1:<REDACTED:len=64>)"
    assert str(TOKEN) == f"{TOKEN}" == "%s" % TOKEN == "k1:<REDACTED:len=64>"  # noqa: UP031
    assert f"{TOKEN:>22}" == "  k1:<REDACTED:len=64>"


@for_each("text", ["", "secret", "secret:", ":secret", "\nlog line:secret", f"{'k' * 300}:secret", "\ud800:s"])
def test_a_malformed_token_prints_nothing_of_its_text(text: str) -> None:
    assert repr(WaitpointToken(text)) == "WaitpointToken(<REDACTED:malformed>)"


def test_the_fingerprint_is_the_start_of_the_digest() -> None:
    assert (TOKEN.kid, TOKEN.fingerprint) == ("k1", DIGEST[:16])
    for text, parts in {
        "a:b:c": ("a", "b:c"),
        "a:b": ("a", "b"),
        "a:": ("", ""),
        ":b": ("", ""),
        "ab": ("", ""),
    }.items():
        token = WaitpointToken(text)
        assert (token.kid, token.fingerprint) == parts


@dataclasses.dataclass(frozen=True)
class Held:
    token: WaitpointToken


def test_a_token_leaves_the_process_only_when_revealed(caplog: pytest.LogCaptureFixture) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for holder in (TOKEN, {"token": TOKEN}, [Held(TOKEN)]):
            with pytest.raises(TypeError, match=r"WaitpointToken cannot be pickled.*reveal\(\)") as refused:
                pickle.dumps(holder, protocol)
            assert DIGEST[:16] not in f"{refused.value!r}"
    for encode in (json.dumps, msgspec.json.encode, msgspec.msgpack.encode, vars):
        with pytest.raises(TypeError):
            encode(TOKEN)
    logging.getLogger("waitpoints").warning("refused %s %r", TOKEN, [TOKEN], extra={"token": TOKEN})
    assert DIGEST[:16] not in caplog.text
    assert DIGEST[:16] not in repr(caplog.records[0].__dict__)


def test_a_token_is_immutable_and_hashable() -> None:
    assert copy.copy(TOKEN) is copy.deepcopy(TOKEN) is TOKEN
    assert dataclasses.asdict(copy.deepcopy(Held(TOKEN))) == {"token": TOKEN}
    assert {TOKEN, sign_token(KEY, EXECUTION, WAITPOINT)} == {TOKEN}
    assert WaitpointToken(f"k1:{'0' * 64}") != TOKEN
    assert TOKEN.reveal() != TOKEN
    with pytest.raises(AttributeError):
        TOKEN._text = ""
    wrong: Any = None
    with pytest.raises(InvalidInputError, match="invalid_token"):
        WaitpointToken(wrong)
