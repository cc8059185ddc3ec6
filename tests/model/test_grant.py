"""Grant keys: their text, their signature, and malformed ones."""

import hashlib
import hmac

import pytest

from flowfabric.model.errors import EngineError
from flowfabric.model.grant import ClaimGrant, GrantFailure, GrantKey, GrantKind, grant_id, parse_grant_key, sign_grant
from flowfabric.model.ids import ExecutionId
from flowfabric.model.key import SigningKey
from model.cases import for_each

UUID = "11111111-1111-4111-8111-111111111111"
ID = ExecutionId(f"{{fp:7}}:{UUID}")
KEY = SigningKey(kid="k1", secret=bytes.fromhex("ab" * 32))
AT = 1_700_000_000_000

# Computed with openssl dgst -sha256 -mac HMAC over "k1:{fp:7}|<uuid>|pool|pool-1|<at>" and the same with "|reclaim".
CLAIM_DIGEST = "39f4f9e98f9a1bea6b77d1eb8291e4f9d6ab8f196d55049f107f8a12e1b6c9ba"
RECLAIM_DIGEST = "9aa7eabe7cc2ac55211798fd4533fcc3a80c34a8331b4143d87eed06f74e0fbb"


def signed(kind: GrantKind = GrantKind.CLAIM) -> str:
    return sign_grant(KEY, kind, ID, worker_id="pool", worker_instance_id="pool-1", expires_at_ms=AT)


def by_hand(message: str, secret: bytes = KEY.secret) -> str:
    return hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()


def failure(text: object) -> str:
    with pytest.raises(EngineError) as caught:
        parse_grant_key(text)
    assert caught.value.code == "invalid_claim_grant"
    return str(caught.value.detail)


def test_a_grant_key_contains_execution_expiry_and_signature() -> None:
    assert signed() == f"pg:{{fp:7}}:{UUID}:{AT}:k1:{CLAIM_DIGEST}"
    assert signed(GrantKind.RECLAIM) == f"pg:reclaim:{{fp:7}}:{UUID}:{AT}:k1:{RECLAIM_DIGEST}"


def test_the_kid_is_signed_too() -> None:
    message = f"{{fp:7}}|{UUID}|pool|pool-1|{AT}"
    assert signed().endswith(by_hand(f"k1:{message}"))
    other = SigningKey(kid="k2", secret=KEY.secret)
    key = parse_grant_key(signed())
    assert key.is_signed_by(KEY, "pool", "pool-1")
    assert not key.is_signed_by(other, "pool", "pool-1")


def test_a_grant_key_is_parsed_from_the_right() -> None:
    assert parse_grant_key(signed()) == GrantKey(
        kind=GrantKind.CLAIM, execution_id=ID, expires_at_ms=AT, kid="k1", digest=CLAIM_DIGEST
    )
    reclaim = parse_grant_key(signed(GrantKind.RECLAIM))
    assert (reclaim.kind, reclaim.execution_id) == (GrantKind.RECLAIM, ID)


@for_each(
    "worker_id, worker_instance_id, secret",
    [("other", "pool-1", "ab" * 32), ("pool", "pool-2", "ab" * 32), ("pool", "pool-1", "ac" * 32)],
)
def test_a_signature_is_valid_for_one_worker_and_secret(worker_id: str, worker_instance_id: str, secret: str) -> None:
    key = SigningKey(kid="k1", secret=bytes.fromhex(secret))
    assert not parse_grant_key(signed()).is_signed_by(key, worker_id, worker_instance_id)


@for_each(
    "text",
    [
        signed().replace("fp:7", "fp:8"),
        signed().replace(f":{AT}:", f":{AT + 1}:"),
        signed().replace(UUID, UUID.replace("1", "2")),
        signed().replace("pg:", "pg:reclaim:"),
        signed()[:-1] + ("0" if signed()[-1] != "0" else "1"),
    ],
)
def test_a_changed_grant_key_does_not_verify(text: str) -> None:
    assert not parse_grant_key(text).is_signed_by(KEY, "pool", "pool-1")


@for_each(
    "text",
    [
        None,
        7,
        "",
        "pg",
        ":::",
        signed()[3:],
        signed().replace("pg:", "vk:"),
        signed().replace("{fp:7}", "fp:7"),
        signed().replace("{fp:7}", "{fp:07}"),
        signed().replace(UUID, UUID.upper().replace("1", "A")),
        signed().replace(str(AT), f"0{AT}"),
        signed().replace(str(AT), "-1"),
        signed().replace(str(AT), "9" * 20),
        signed().replace(":k1:", "::"),
        signed().replace(":k1:", ":k\0:"),
        signed()[:-1],
        signed() + "0",
        signed()[:-64] + signed()[-64:].upper(),
        signed()[:-1] + "g",
        signed() + "\n",
    ],
)
def test_any_other_text_is_a_malformed_grant_key(text: object) -> None:
    assert failure(text) == "Malformed: this is not a grant key; pass the grant_key of the grant unchanged"


def test_the_detail_of_a_rejected_grant_begins_with_the_failure() -> None:
    codes = {failure: (failure.refusal().code, str(failure.refusal().detail)) for failure in GrantFailure}
    assert {failure: (code, detail.partition(": ")[0]) for failure, (code, detail) in codes.items()} == {
        GrantFailure.MALFORMED: ("invalid_claim_grant", "Malformed"),
        GrantFailure.EXPIRED: ("claim_grant_expired", "Expired"),
        GrantFailure.UNKNOWN_KID: ("invalid_claim_grant", "UnknownKid"),
        GrantFailure.UNKNOWN_GRANT: ("invalid_claim_grant", "UnknownGrant"),
        GrantFailure.SIGNATURE_MISMATCH: ("invalid_claim_grant", "SignatureMismatch"),
    }


def test_a_grant_is_stored_under_the_hash_of_its_key() -> None:
    assert grant_id(signed()) == hashlib.sha256(signed().encode()).digest()


def test_a_claim_grant_becomes_a_resume_grant_with_its_lane() -> None:
    grant = ClaimGrant(execution_id=ID, partition_key="{fp:7}", grant_key=signed(), expires_at_ms=AT)
    resumed = grant.for_resume("mail")
    assert (resumed.execution_id, resumed.grant_key, resumed.lane_id) == (ID, signed(), "mail")


def test_neither_a_secret_nor_a_grant_key_is_shown() -> None:
    grant = ClaimGrant(execution_id=ID, partition_key="{fp:7}", grant_key=signed(), expires_at_ms=AT)
    shown = f"{KEY!r} {KEY} {grant!r}"
    assert "abab" not in shown
    assert str(KEY.secret) not in shown
    assert CLAIM_DIGEST not in shown
