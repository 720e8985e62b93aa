"""The quantizer to mxfp8 against its definition, element by element: scales, codes, NaN, atoms."""

from __future__ import annotations

import math

import pytest
import torch
from paged_cases import offsets

from fa4_hd256.quantize import dequantize_mxfp8, quantize_mxfp8, quantize_mxfp8_training

E4M3 = torch.float8_e4m3fn
#: Value of each finite code, in float64.
CODES = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
FINITE = CODES.isfinite().nonzero().flatten()


def least_scale(block):
    """The exponent of the least power of two, of those that E8M0 has, with no element past 448."""
    largest = max((abs(x) for x in block if math.isfinite(x)), default=0.0)
    return next(e for e in range(-127, 128) if largest <= 448 * 2.0**e)


def nearest(value, code):
    """Return True if no finite code is nearer to a value, and none as near has an even pattern."""
    distances = (CODES[FINITE] - value).abs()
    own = abs(float(CODES[code]) - value)
    nearer = FINITE[distances < own]
    as_near = FINITE[(distances == own) & (CODES[FINITE] != CODES[code])]
    return not len(nearer) and (not len(as_near) or code % 2 == 0)


def atom_byte(row, block):
    return row % 32 * 16 + row // 32 % 4 * 4 + block % 4


def place_in(name, shape, where):
    """Byte of the scale of an element of a dense tensor. where: (batch, token, head, column)."""
    batch, seqlen, heads, _ = shape
    entry, token, head, column = where
    tiles, plane = -(-seqlen // 128), entry * heads + head
    if name == "v":
        atom = column // 128 * batch * heads * tiles + plane * tiles + token // 128
        return atom * 512 + atom_byte(column % 128, token // 32)
    return ((plane * tiles + token // 128) * 2 + column // 128) * 512 + atom_byte(
        token % 128, column // 32
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("seqlen", [1, 32, 130, 257])
def test_every_scale_and_some_codes(name, seqlen):
    """Blocks of one magnitude, of many, at both ends of float32, of zeros and of subnormals."""
    torch.manual_seed(5)
    shape = (2, seqlen, 2, 256)
    exponents = torch.randint(-140, 127, shape).where(torch.rand(shape) < 0.1, 0.0).float()
    x = (torch.randn(shape).double() * torch.exp2(exponents.double())).float()
    x = x.masked_fill(x.isinf(), 3e38)
    x[0, :, 0, 32:96] = 0.0
    x[1, :, 1, 64:96] *= 1e-38
    given = quantize_mxfp8(x, x, x)
    codes = getattr(given, name).view(torch.uint8)
    scales = getattr(given, f"{name}_descale").view(torch.uint8).flatten()
    assert scales.numel() == 2 * 2 * -(-seqlen // 128) * 1024
    for entry in range(2):
        for head in range(2):
            for row, column in ((r, c) for r in range(0, seqlen, 1 if name != "v" else 32)
                                for c in range(0, 256, 32 if name != "v" else 1)):  # fmt: skip
                rows = slice(row, row + 1) if name != "v" else slice(row, row + 32)
                columns = slice(column, column + (32 if name != "v" else 1))
                block = x[entry, rows, head, columns].flatten().tolist()
                wanted = least_scale(block)
                assert scales[place_in(name, shape, (entry, row, head, column))] == wanted + 127
                scaled, code = block[0] / 2.0**wanted, int(codes[entry, row, head, column])
                if (row + column) % 96 == 0:
                    assert nearest(scaled, code)


def test_special_elements():
    """NaN and infinity are NaN and nothing to the scale; 448 times a power of two fits it."""
    x = torch.ones(1, 1, 1, 256)
    x[..., 0], x[..., 1] = math.nan, -math.inf
    x[..., 32], x[..., 64] = 448.0, 448.0 * (1 + 2**-22)
    x[..., 96:128] = math.nan
    given = quantize_mxfp8(x, x, x)
    codes = given.q.float()[0, 0, 0]
    assert codes[:2].isnan().all() and codes[96:128].isnan().all()
    assert not codes[2:96].isnan().any() and not codes[128:].isnan().any()
    exponents = given.q_descale.view(torch.uint8).flatten().tolist()
    found = [exponents[block // 4 * 512 + block % 4] - 127 for block in range(8)]
    assert found == [-8, 0, 1, -127, -8, -8, -8, -8]
    assert codes[2] == 256 and codes[32] == 448 and codes[64] == 224 and codes[65] == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_stand_for_what_was_given(dtype):
    """Within half of the last of four bits, or half of the least step of the block's scale."""
    x = torch.randn(2, 140, 3, 256).to(dtype)
    given = quantize_mxfp8(x, x, x)
    for name in "qkv":
        scales = getattr(given, f"{name}_descale")
        found = dequantize_mxfp8(getattr(given, name), scales, along_keys=name == "v")
        largest = x.double().abs().max()
        assert ((found - x.double()).abs() <= x.double().abs() / 16 + largest * 2**-17).all()


@pytest.mark.parametrize("lengths", [(130, 0, 1, 128), (5,), (40,) * 9], ids=str)
def test_packed_sequences_are_each_quantized_alone(lengths):
    """The atoms of a sequence are those of the sequence alone; rows behind the last are 0."""
    begins, heads = offsets(lengths), 2
    x = torch.randn(sum(lengths) + 3, heads, 256)
    given = quantize_mxfp8(x, x, x, begins, begins)
    tiles = sum(-(-n // 128) for n in lengths)
    assert not given.q[sum(lengths) :].view(torch.uint8).any()
    before = 0
    for begin, length in zip(begins.tolist(), lengths):
        rows, own = slice(begin, begin + length), -(-length // 128)
        if not length:
            continue
        alone = quantize_mxfp8(*(x[None, rows] for _ in "qkv"))
        for name in "qkv":
            codes = [getattr(one, name).view(torch.uint8) for one in (given, alone)]
            assert torch.equal(codes[0][rows], codes[1][0])
            packed = getattr(given, f"{name}_descale").view(torch.uint8)
            atoms = packed.reshape(heads, -1, 2, 512)[:, before : before + own]
            dense = getattr(alone, f"{name}_descale").view(torch.uint8)
            form = (2, heads, own, 512) if name == "v" else (heads, own, 2, 512)
            dense = dense.reshape(form)
            assert torch.equal(atoms, dense.permute(1, 2, 0, 3) if name == "v" else dense)
        before += own
    assert given.v_descale.shape[-1] >= 4 * tiles == 4 * before
    for name in "qkv":
        scales = getattr(given, f"{name}_descale")
        found = dequantize_mxfp8(getattr(given, name), scales, begins, along_keys=name == "v")
        assert ((found - x)[: sum(lengths)].abs() <= x[: sum(lengths)].abs() / 16 + 2e-3).all()


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [(torch.zeros(1, 3, 2, 128), ValueError, r"q has shape \(1, 3, 2, 128\); accepted: \(batch"),
     (torch.zeros(3, 2, 256), ValueError, "with cu_seqlens"),
     (torch.zeros(1, 3, 2, 256, dtype=torch.int32), TypeError, "q has dtype torch.int32; accep")],
    ids=("head_dim", "packed", "dtype"),
)  # fmt: skip
def test_what_is_refused(tensor, error, message):
    with pytest.raises(error, match=message):
        quantize_mxfp8(tensor, tensor, tensor)


# ---------------------------------------------------------------- what is refused


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("begins", "error", "message"),
    [(int32(3, 8), ValueError, r"cu_seqlens of q is \[3, 8\]; accepted: .* 0 to at most 11"),
     (int32(0, 8, 5), ValueError, r"cu_seqlens of q is \[0, 8, 5\]"),
     (int32(0, 5, 20), ValueError, r"cu_seqlens of q is \[0, 5, 20\]"),
     (int32(), ValueError, r"cu_seqlens of q has shape \(0,\)"),
     (int32(0, 5)[None], ValueError, r"cu_seqlens of q has shape \(1, 2\)"),
     (torch.tensor([0.0, 5.0]), TypeError, "cu_seqlens of q has dtype torch.float32"),
     ([0, 5, 11], TypeError, "cu_seqlens of q must be a torch.Tensor, got list")],
    ids=str,
)  # fmt: skip
def test_offsets_that_are_none_of_the_rows_are_refused(begins, error, message):
    """Rows would be written where no memory is."""
    x = torch.randn(11, 2, 256)
    with pytest.raises(error, match=message):
        quantize_mxfp8(x, x, x, begins, begins)


@pytest.mark.parametrize("quantize", [quantize_mxfp8, quantize_mxfp8_training])
def test_what_is_no_tensor_is_refused(quantize):
    with pytest.raises(TypeError, match="q must be a torch.Tensor, got list"):
        quantize([1.0], torch.zeros(1), torch.zeros(1))


def test_scales_of_other_codes_are_refused():
    given = quantize_mxfp8(*(torch.randn(1, 300, 2, 256) for _ in "qkv"))
    with pytest.raises(ValueError, match=r"\(1, 2, 256, 12\); accepted: \(1, 2, 384, 8\), of such"):
        dequantize_mxfp8(given.v, given.v_descale)
    with pytest.raises(ValueError, match="accepted: .*, of such codes with along_keys"):
        dequantize_mxfp8(given.q, given.q_descale, along_keys=True)
    with pytest.raises(TypeError, match="codes are torch.float32, descale torch.float8_e8m0fnu"):
        dequantize_mxfp8(given.q.float(), given.q_descale)
