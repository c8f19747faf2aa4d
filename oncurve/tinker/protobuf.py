"""The messages that the Tinker SDK sends and reads as protocol buffers: training requests and outputs, and samples.

The field numbers are those of ``tinker/proto/tinker_public_pb2.py`` in the SDK 0.36. A message is a series of fields, each with
a number and a value: an integer (varint), eight bytes, or bytes with their length, which may hold a message in turn. Fields
that this server does not know are refused: they could change what a request means.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from oncurve.records import Floats, Ints

VARINT, EIGHT_BYTES, BYTES = 0, 1, 2
FLOAT32, INT64 = 1, 2
"""Values of the enumeration DType."""
STOP, LENGTH = 0, 1
"""Values of the enumeration StopReason."""
MAX_VARINT_BYTES = 10

Array: TypeAlias = "Floats | Ints"
Value = int | float | bytes


class ProtobufError(ValueError):
    """A body that is not a message of the expected type, or has a field that this server does not support."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence with what its loss needs of each position: the model reads ``token_ids``, and position i predicts
    ``inputs["target_tokens"][i]``."""

    token_ids: Ints
    inputs: Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """A forward pass over some sequences, and the backward pass unless it is ``forward_only``."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss: str
    config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


def read_training_request(body: bytes) -> TrainingRequest:
    """The message ForwardBackwardRequest."""
    model_id, seq_id, loss, forward_only = "", 0, "", False
    data: list[Datum] = []
    numbers: dict[str, float | str] = {}
    config: dict[str, float | str] = {}
    for number, value in read_fields(body):
        match number:
            case 1:
                model_id = _text(value)
            case 2:
                seq_id = _integer(value)
            case 3:
                data.append(_read_datum(_bytes(value)))
            case 4:
                loss = _text(value)
            case 5:  # the same numbers once more, for servers of an older version
                key, entry = _read_entry(_bytes(value), default=0.0)
                numbers[key] = _number(entry)
            case 6:
                forward_only = bool(_integer(value))
            case 7:
                key, entry = _read_entry(_bytes(value), default=b"")
                config[key] = _read_setting(_bytes(entry))
            case _:
                raise _unknown("ForwardBackwardRequest", number)
    return TrainingRequest(model_id, seq_id, tuple(data), loss, numbers | config, forward_only)


def _read_setting(message: bytes) -> float | str:
    for number, value in read_fields(message):
        if number == 1:
            return _number(value)
        if number == 2:
            return _text(value)
        raise _unknown("LossConfigValue", number)
    raise ProtobufError("a setting of the loss has no value")


def _read_datum(message: bytes) -> Datum:
    chunks: list[Ints] = []
    inputs: dict[str, Array] = {}
    for number, value in read_fields(message):
        if number == 1:
            chunks.append(_read_chunk(_bytes(value)))
        elif number == 2:
            key, entry = _read_entry(_bytes(value), default=b"")
            inputs[key] = read_tensor(_bytes(entry), key)
        elif number not in (3, 4):  # spans that name where tokens were sampled: nothing here is computed from them
            raise _unknown("Datum", number)
    return Datum(np.concatenate(chunks) if chunks else np.zeros(0, np.int64), inputs)


def _read_chunk(message: bytes) -> Ints:
    for number, value in read_fields(message):
        if number == 1:
            parts = [_bytes(tokens) for _, tokens in read_fields(_bytes(value))]
            return _array(b"".join(parts), "<i4", "tokens").astype(np.int64)
        kind = {2: "an image", 3: "audio"}.get(number, f"a chunk of type {number}")
        raise ProtobufError(f"{kind} in model_input: this server trains on token ids only")
    return np.zeros(0, np.int64)


def read_tensor(message: bytes, name: str) -> Array:
    """The message Tensor, dense."""
    data, dtype, shape = b"", 0, list[int]()
    for number, value in read_fields(message):
        if number == 1:
            data = _bytes(value)
        elif number == 2:
            raise ProtobufError(f"loss_fn_inputs[{name!r}] is sparse: send it dense")
        elif number == 3:
            dtype = _integer(value)
        elif number == 4:
            shape += [value] if isinstance(value, int) else list(_read_varints(_bytes(value)))
        else:
            raise _unknown("Tensor", number)
    if dtype not in (FLOAT32, INT64):
        raise ProtobufError(f"loss_fn_inputs[{name!r}] has dtype {dtype}: float32 and int64 are supported")
    array = _array(data, "<f4" if dtype == FLOAT32 else "<i8", name)
    if shape and (math.prod(shape) != array.size or max(shape) >= 1 << 31):
        raise ProtobufError(f"loss_fn_inputs[{name!r}] has {array.size} values, but shape {shape}")
    return array.reshape(shape) if shape else array


def _array(data: bytes, dtype: str, name: str) -> Array:
    if len(data) % np.dtype(dtype).itemsize:
        raise ProtobufError(f"{name!r} has {len(data)} bytes, which is not a whole number of values")
    return np.frombuffer(data, dtype).copy()


def write_training_output(logps: Sequence[Floats], metrics: Mapping[str, float]) -> bytes:
    """The message ForwardBackwardOutput: the log-probs of each datum's targets, and metrics."""
    sizes = np.cumsum([0, *(4 * array.size for array in logps)]).astype("<i8")
    trailing = b"".join(_varint(size) for size in (logps[0].shape[1:] if logps else ()))
    batched = (
        write_field(1, b"".join(array.astype("<f4").tobytes() for array in logps))
        + write_field(2, sizes.tobytes())
        + write_field(3, FLOAT32)
        + (write_field(4, trailing) if trailing else b"")
    )
    record = write_field(1, "ArrayRecord") + _write_entry("logprobs", batched, 2) + write_field(3, len(logps))
    out = write_field(1, "ArrayRecord") + write_field(2, record)
    return out + b"".join(_write_entry(key, value, 3) for key, value in metrics.items())


@dataclass(frozen=True, slots=True)
class TopLogps:
    """The likeliest tokens at each position, and their log-probs, both [length, k]."""

    token_ids: Ints
    logps: Floats


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """A sampled sequence. ``is_truncated``: it reached the limit of tokens."""

    token_ids: Ints
    logps: Floats
    is_truncated: bool
    top: TopLogps | None = None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """The answer to a sample request. Missing log-probs of the prompt are NaN."""

    sequences: tuple[SampledSequence, ...]
    prompt_logps: Floats | None = None
    prompt_top: TopLogps | None = None


def write_sample_output(output: SampleOutput) -> bytes:
    """The message SampleResponse."""
    out = b"".join(write_field(1, _write_sequence(sequence)) for sequence in output.sequences)
    if output.prompt_logps is not None:
        out += write_field(2, output.prompt_logps.astype("<f4").tobytes())
    if output.prompt_top is not None:
        out += write_field(3, _write_top(output.prompt_top))
    return out


def _write_sequence(sequence: SampledSequence) -> bytes:
    out = write_field(1, LENGTH if sequence.is_truncated else STOP)
    out += write_field(2, sequence.token_ids.astype("<i4").tobytes()) + write_field(3, sequence.logps.astype("<f4").tobytes())
    return out + (write_field(4, _write_top(sequence.top)) if sequence.top is not None else b"")


def _write_top(top: TopLogps) -> bytes:
    length, k = top.token_ids.shape
    out = write_field(1, top.token_ids.astype("<i4").tobytes()) + write_field(2, top.logps.astype("<f4").tobytes())
    return out + write_field(3, k) + write_field(4, length)


def read_fields(message: bytes) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field of a message, in order."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        value: Value
        if kind == VARINT:
            value, at = _read_varint(message, at)
        elif kind == EIGHT_BYTES:
            if at + 8 > len(message):
                raise ProtobufError("the message ends within a field")
            (value,), at = struct.unpack_from("<d", message, at), at + 8
        elif kind == BYTES:
            length, at = _read_varint(message, at)
            if at + length > len(message):
                raise ProtobufError("the message ends within a field")
            value, at = message[at : at + length], at + length
        else:
            raise ProtobufError(f"field {number} has wire type {kind}, which no message here has")
        yield number, value


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(MAX_VARINT_BYTES):
        if at >= len(message):
            raise ProtobufError("the message ends within a number")
        byte, at = message[at], at + 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at
    raise ProtobufError("a number has more than 64 bits")


def _read_varints(packed: bytes) -> Iterator[int]:
    at = 0
    while at < len(packed):
        value, at = _read_varint(packed, at)
        yield value


def _read_entry(message: bytes, default: Value) -> tuple[str, Value]:
    """An entry of a map: its key and value."""
    fields = dict(read_fields(message))
    return _text(fields.get(1, b"")), fields.get(2, default)


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ProtobufError("a number in place of bytes")
    return value


def _text(value: Value) -> str:
    try:
        return _bytes(value).decode("utf-8")
    except UnicodeDecodeError:
        raise ProtobufError("a text that is not UTF-8") from None


def _integer(value: Value) -> int:
    if not isinstance(value, int):
        raise ProtobufError("no integer where one is expected")
    return value


def _number(value: Value) -> float:
    if not isinstance(value, float):
        raise ProtobufError("no number where one is expected")
    return value


def _unknown(message: str, number: int) -> ProtobufError:
    return ProtobufError(f"field {number} of {message} is unknown to this server: use the SDK version in docs/tinker.md")


def write_field(number: int, value: int | float | bytes | str) -> bytes:
    """A field of a message."""
    if isinstance(value, float):
        return _varint(number << 3 | EIGHT_BYTES) + struct.pack("<d", value)
    if isinstance(value, int):
        return _varint(number << 3 | VARINT) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | BYTES) + _varint(len(data)) + data


def _write_entry(key: str, value: bytes | float, number: int) -> bytes:
    return write_field(number, write_field(1, key) + write_field(2, value))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
