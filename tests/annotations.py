"""Types and values for the tests of payloads."""

import dataclasses
import enum
import typing
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pydantic
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from typing_extensions import TypedDict

BASE64 = pydantic.ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Odd(enum.Enum):
    """Its values change when they are stored as JSON."""

    PAIR = (1, 2)
    FRACTION = 0.5


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Silent:
    """A class without equality: a decoded copy is never equal."""

    x: int
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Struct(msgspec.Struct, rename="camel"):
    first_name: str
    at: datetime | None = None


class Row(TypedDict):
    """From typing_extensions: Pydantic refuses the TypedDict of `typing` before Python 3.12."""

    key: str
    value: int


class Pair(NamedTuple):
    left: int
    right: str


class Aliased(pydantic.BaseModel):
    user_id: int = pydantic.Field(alias="userId")
    note: str = pydantic.Field("", validation_alias=pydantic.AliasChoices("n", "remark"), serialization_alias="text")


class Swapped(pydantic.BaseModel):
    """The alias of each field is the name of the other."""

    model_config = pydantic.ConfigDict(validate_by_name=True)
    a: int = pydantic.Field(alias="b")
    b: int = pydantic.Field(alias="a")


class Computed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    width: int

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def area(self) -> int:
        return self.width**2


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    a: int = pydantic.Field(1, alias="b")


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    when: datetime
    number: Decimal
    pair: tuple[int, int]


class Private(pydantic.BaseModel):
    a: int = 1
    _hidden: int = pydantic.PrivateAttr(default=0)


class Excluded(pydantic.BaseModel):
    a: int = 1
    b: int = pydantic.Field(0, exclude=True)


class Blob(pydantic.BaseModel):
    data: bytes


class Base64(pydantic.BaseModel):
    model_config = BASE64
    data: bytes


class Loose(pydantic.BaseModel):
    anything: Any = None
    ratio: float | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"] = "dog"
    tricks: list[str] = []


class Twin(pydantic.BaseModel):
    lives: int = 9


class Kitten(Cat):
    age: int = 0


Item = typing.TypeVar("Item")


class Box(pydantic.BaseModel, typing.Generic[Item]):
    item: Item


class Tree(pydantic.BaseModel):
    name: str
    children: list["Tree"] = []


class Names(pydantic.RootModel[list[str]]):
    pass


@pydantic.dataclasses.dataclass
class Checked:
    n: Annotated[int, pydantic.Field(gt=0)]
    who: str = pydantic.Field("", alias="name")


@dataclasses.dataclass
class Order:
    """A dataclass that holds a model."""

    number: int
    animal: Cat | Dog | None = None


@dataclasses.dataclass
class Stamped:
    """A dataclass that holds bytes and a model."""

    pair: tuple[bytes, Cat]
    names: frozenset[str] = frozenset()


class StampedRow(TypedDict):
    data: bytes
    animal: Cat


@pydantic.dataclasses.dataclass
class CheckedBlob:
    data: bytes


class Holder(msgspec.Struct):
    """A struct that holds a model."""

    animal: Cat
    names: list[str] = []


class Login(pydantic.BaseModel):
    user: str
    password: pydantic.SecretStr


class Revealing(pydantic.BaseModel):
    pin: pydantic.Secret[int]

    @pydantic.field_serializer("pin")
    def reveal(self, pin: pydantic.Secret[int]) -> int:
        return pin.get_secret_value()


class Opaque:
    """A class that cannot be stored as JSON."""


SECRETS: list[Any] = [
    pydantic.SecretStr,
    pydantic.SecretBytes,
    pydantic.Secret[int],
    list[pydantic.SecretStr],
    Login,
    dict[str, Login | None],
    Revealing,
    msgspec.defstruct("Keyring", [("login", Login)]),
    dataclasses.make_dataclass("Wallet", [("key", pydantic.SecretBytes)]),
]

Typed = tuple[Any, SearchStrategy[Any]]
"""A type and a strategy for its values."""

_finite = st.floats(allow_nan=False, allow_infinity=False)
_cats = st.builds(Cat, lives=st.integers(0, 9))
_dogs = st.builds(Dog, tricks=st.lists(st.text(max_size=3), max_size=2))

KEYS: list[Typed] = [
    (str, st.text(max_size=5)),
    (int, st.integers()),
    (uuid.UUID, st.uuids()),
    (date, st.dates()),
    (Color, st.sampled_from(Color)),
    (Level, st.sampled_from(Level)),
]

PLAIN: list[Typed] = [
    *KEYS,
    (bool, st.booleans()),
    (float, _finite),
    (bytes, st.binary(max_size=8)),
    (None, st.none()),
    (Mode, st.sampled_from(Mode)),
    (datetime, st.datetimes() | st.datetimes(timezones=st.just(UTC))),
    (time, st.times()),
    (timedelta, st.timedeltas(timedelta(days=-999), timedelta(days=999))),
    (Decimal, st.decimals(allow_nan=False, allow_infinity=False)),
    (Literal["a", 1, None], st.sampled_from(["a", 1, None])),
    (Any, st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3))),
    (Point, st.builds(Point, x=st.integers(), y=_finite)),
    (Row, st.fixed_dictionaries({"key": st.text(max_size=4), "value": st.integers()})),
    (Pair, st.builds(Pair, left=st.integers(), right=st.text(max_size=4))),
    (Annotated[int, msgspec.Meta(gt=0)], st.integers(1, 9)),
]
"""Types that both msgspec and Pydantic know."""

STRUCTS: list[Typed] = [
    *PLAIN,
    (Struct, st.builds(Struct, first_name=st.text(max_size=4), at=st.none() | st.datetimes())),
    (Holder, st.builds(Holder, animal=_cats)),
]

MODELS: list[Typed] = [
    *PLAIN,
    (Path, st.sampled_from([Path("/tmp/x"), Path("a") / "b", Path()])),
    (object, st.integers() | st.text(max_size=3)),
    (
        Aliased,
        st.builds(lambda a, b: Aliased.model_validate({"userId": a, "n": b}), st.integers(), st.text(max_size=4)),
    ),
    (Computed, st.builds(Computed, width=st.integers())),
    (Open, st.builds(lambda extra: Open.model_validate({"b": 2, "zz": extra}), st.text(max_size=3))),
    (Strict, st.builds(Strict, when=st.datetimes(), number=st.just(Decimal("1.5")), pair=st.just((1, 2)))),
    (Base64, st.builds(Base64, data=st.binary(max_size=8))),
    (Cat | Dog, _cats | _dogs),
    (Cat | int | None, _cats | st.integers() | st.none()),
    (Annotated[Cat | Dog, pydantic.Field(discriminator="kind")], _cats | _dogs),
    (Annotated[int, pydantic.Field(gt=0)], st.integers(1, 9)),
    (Box[int], st.builds(Box[int], item=st.integers())),
    (Tree, st.just(Tree(name="a", children=[Tree(name="b")]))),
    (Names, st.builds(Names, st.lists(st.text(max_size=3), max_size=2))),
    (Checked, st.builds(lambda n, who: Checked(n, name=who), st.integers(1, 9), st.text(max_size=3))),
    (Order, st.builds(Order, number=st.integers(), animal=st.none() | _cats | _dogs)),
    (Stamped, st.builds(Stamped, st.tuples(st.binary(max_size=4), _cats))),
    (StampedRow, st.fixed_dictionaries({"data": st.binary(max_size=4), "animal": _cats})),
]

DOUBTFUL: list[Typed] = [
    *STRUCTS,
    *MODELS,
    (str, st.text(st.characters(), max_size=5) | st.just("\ud800")),
    (float, st.floats()),
    (float | None, st.floats() | st.none()),
    (Decimal, st.decimals() | st.just(Decimal("sNaN"))),
    (datetime, st.datetimes(timezones=st.timezones(), allow_imaginary=True)),
    (timedelta, st.timedeltas()),
    (time, st.times(timezones=st.timezones())),
    (complex, st.complex_numbers()),
    (Odd, st.sampled_from(Odd)),
    (Bits, st.sampled_from([Bits.A, Bits.A | Bits.B, Bits(0)])),
    (Silent, st.builds(Silent, st.integers())),
    (Swapped, st.builds(Swapped, a=st.integers(0, 2), b=st.integers(0, 2))),
    (Private, st.integers(0, 2).map(lambda hidden: _with_hidden(hidden))),
    (Excluded, st.builds(Excluded, a=st.integers(0, 2), b=st.integers(0, 2))),
    (Blob, st.builds(Blob, data=st.binary(max_size=4))),
    (CheckedBlob, st.builds(CheckedBlob, data=st.binary(max_size=4))),
    (Loose, st.builds(Loose, anything=st.binary() | st.floats() | _cats | st.tuples(st.integers()), ratio=st.floats())),
    (Cat | Twin, _cats | st.builds(Twin)),
    (Cat, st.builds(Kitten)),
    (Any, st.binary() | st.floats() | st.tuples(st.integers()) | _cats | st.sets(st.integers()) | st.datetimes()),
    (object, st.binary() | st.floats() | st.builds(Opaque) | st.decimals() | st.uuids() | st.sampled_from(Odd)),
    (Opaque, st.builds(Opaque)),
    (Callable[[int], int], st.just(abs)),
    (type, st.just(int)),
    (typing.Iterable[int], st.lists(st.integers())),
    (typing.Sequence[int], st.lists(st.integers()) | st.tuples(st.integers())),
    (list, st.lists(st.floats() | st.binary() | st.tuples(st.integers()))),
    (dict, st.dictionaries(st.integers() | st.text(max_size=2) | st.none() | st.booleans(), st.floats())),
    (int | str | bytes | float, st.integers() | st.text(max_size=2) | st.binary(max_size=3) | st.floats()),
    (Struct | Point, st.builds(Point, x=st.integers())),
    (
        list[int] | tuple[int, ...] | set[int],
        st.lists(st.integers()) | st.tuples(st.integers()) | st.sets(st.integers()),
    ),
    (Struct | Cat, _cats),
    *((kind, st.builds(Opaque)) for kind in SECRETS),
]
"""Types and values of which some are refused, because they would not decode to an equal value."""


def _with_hidden(hidden: int) -> Private:
    made = Private()
    made._hidden = hidden
    return made


def typed(leaves: list[Typed]) -> SearchStrategy[tuple[Any, Any]]:
    """Draw a type that is composed of others, and a value of it."""
    return st.recursive(st.sampled_from(leaves), _composed, max_leaves=4).flatmap(
        lambda pair: st.tuples(st.just(pair[0]), pair[1])
    )


def _composed(inner: SearchStrategy[Typed]) -> SearchStrategy[Typed]:
    keys = st.sampled_from(KEYS)

    def several(kind: Any, values: SearchStrategy[Any]) -> SearchStrategy[Typed]:
        few = st.lists(values, max_size=3)
        return st.sampled_from(
            [
                (GenericAlias(list, (kind,)), few),
                (GenericAlias(tuple, (kind, ...)), few.map(tuple)),
                (kind if kind is None else kind | None, st.none() | values),
                _dataclass_of(kind, values),
                _model_of(kind, values),
            ]
        )

    def distinct(kind: Any, values: SearchStrategy[Any]) -> SearchStrategy[Typed]:
        return st.sampled_from(
            [
                (GenericAlias(set, (kind,)), st.sets(values, max_size=3)),
                (GenericAlias(frozenset, (kind,)), st.frozensets(values, max_size=3)),
            ]
        )

    def paired(left: Typed, right: Typed) -> Typed:
        return GenericAlias(tuple, (left[0], right[0])), st.tuples(left[1], right[1])

    def mapped(key: Typed, value: Typed) -> Typed:
        return GenericAlias(dict, (key[0], value[0])), st.dictionaries(key[1], value[1], max_size=3)

    return st.one_of(
        inner.flatmap(lambda pair: several(*pair)),
        keys.flatmap(lambda pair: distinct(*pair)),
        st.builds(paired, inner, inner),
        st.builds(mapped, keys, inner),
    )


def _dataclass_of(kind: Any, values: SearchStrategy[Any]) -> Typed:
    made = dataclasses.make_dataclass("Made", [("a", kind), ("n", int, 0)])
    return made, st.builds(made, values, st.integers())


def _model_of(kind: Any, values: SearchStrategy[Any]) -> Typed:
    # A struct cannot be a field of a model.
    try:
        made = pydantic.create_model("Made", __config__=BASE64, a=(kind, pydantic.Field(alias="b")))
    except (pydantic.PydanticUserError, NameError):
        return kind, values
    return made, values.map(lambda value: made.model_construct(a=value))
