"""The wire format against bytes that the SDK's own encoder wrote."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from oncurve.records import Floats
from oncurve.tinker.protobuf import (
    FLOAT32,
    ProtobufError,
    SampledSequence,
    SampleOutput,
    _varint,
    read_fields,
    read_tensor,
    read_training_request,
    write_field,
    write_sample_output,
    write_training_output,
)


def floats(values: list[float]) -> Floats:
    return np.asarray(values, np.float32)


REQUEST = bytes.fromhex(
    "0a096d3a747261696e3a3010ac021a6d0a0c0a0a0a08050000002c0100000a080a060a040700000012210a0a616476616e746167657312130a0c0000000000"
    "00c03f000000c0180122010312300a0d7461726765745f746f6b656e73121f0a182c010000000000000700000000000000020000000000000018022201032203"
    "70706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411000000000000000030013a1f0a12636c69705f6c6f775f7468726573686f6c641209090000"
    "0000000000003a0b0a046d6f64651203120178"
)
"""From tinker 0.36.0: tokens [5, 300] and [7], two inputs, loss ppo with two settings, seq_id 300, forward only."""


def test_a_request_of_the_sdk() -> None:
    request = read_training_request(REQUEST)
    assert (request.model_id, request.seq_id, request.loss, request.forward_only) == ("m:train:0", 300, "ppo", True)
    assert request.config == {"clip_low_threshold": 0.0, "mode": "x"}
    (datum,) = request.data
    assert datum.token_ids.tolist() == [5, 300, 7]
    assert datum.inputs["target_tokens"].tolist() == [300, 7, 2]
    assert datum.inputs["advantages"].tolist() == [0.0, 1.5, -2.0]


@pytest.mark.parametrize("length", range(1, len(REQUEST), 7))
def test_a_request_that_was_cut_is_refused_or_shorter(length: int) -> None:
    """No cut ends in another error."""
    with suppress(ProtobufError):
        assert len(read_training_request(REQUEST[:length]).config) < 2


def test_images_sparse_tensors_and_unknown_fields_are_refused() -> None:
    image = write_field(3, write_field(1, write_field(2, write_field(1, b"png"))))
    sparse = write_field(3, write_field(2, write_field(1, "weights") + write_field(2, write_field(2, b""))))
    for body, message in ((image, "image"), (sparse, "sparse"), (write_field(9, 1), "unknown")):
        with pytest.raises(ProtobufError, match=message):
            read_training_request(body)


def test_a_training_output_has_the_layout_of_the_sdk() -> None:
    """BatchedTensor: all values in one buffer, with each datum's bytes from one offset to the next."""
    body = write_training_output([floats([-1, -2]), floats([-3])], {"loss:sum": 6.0})
    fields = list(read_fields(body))
    assert [number for number, _ in fields] == [1, 2, 3]
    record = dict(read_fields(fields[1][1]))  # type: ignore[arg-type]
    assert record[3] == 2
    tensor = dict(read_fields(dict(read_fields(record[2]))[2]))  # type: ignore[arg-type]
    assert np.frombuffer(tensor[1], "<f4").tolist() == [-1, -2, -3]  # type: ignore[arg-type]
    assert np.frombuffer(tensor[2], "<i8").tolist() == [0, 8, 12]  # type: ignore[arg-type]
    assert dict(read_fields(fields[2][1])) == {1: b"loss:sum", 2: 6.0}  # type: ignore[arg-type]


def test_a_sample_output_has_the_layout_of_the_sdk() -> None:
    sequence = SampledSequence(np.array([7, 300]), floats([-0.5, -1]), is_truncated=True)
    fields = dict(read_fields(write_sample_output(SampleOutput((sequence,), floats([np.nan, -2])))))
    of_sequence = dict(read_fields(fields[1]))  # type: ignore[arg-type]
    assert of_sequence[1] == 1
    assert np.frombuffer(of_sequence[2], "<i4").tolist() == [7, 300]  # type: ignore[arg-type]
    assert np.frombuffer(of_sequence[3], "<f4").tolist() == [-0.5, -1]  # type: ignore[arg-type]
    assert np.isnan(np.frombuffer(fields[2], "<f4")[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [[1 << 32, 1 << 32], [1 << 62, 1 << 62, 0]])
def test_a_shape_whose_product_overflows_is_refused(sizes: list[int]) -> None:
    shape = b"".join(_varint(size) for size in sizes)
    with pytest.raises(ProtobufError, match="has 0 values"):
        read_tensor(write_field(3, FLOAT32) + write_field(4, shape), "weights")
