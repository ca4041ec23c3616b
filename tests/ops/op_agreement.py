"""Compares the kernel that a device runs with the specification, `whale_torch.ops.reference`, run on CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from whale_torch import ops
from whale_torch.ops import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [0, 1, 3, 17, 1023]


def bucket_tensors(dtype: torch.dtype, special: bool = False) -> list[Tensor]:
    """Sizes and strides that a bucket meets, and some that it should not."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = [
        draw(()) if not shape else draw(*shape)
        for shape in [(), (0,), (1,), (3,), (17,), (1023,), (5, 0, 2), (33, 1500)]
    ]
    tensors += [
        draw(2, 3, 4, 5).to(memory_format=torch.channels_last),
        draw(8, 6, 3, 3).to(memory_format=torch.channels_last),
        draw(40, 1100).t(),
        draw(6, 10)[:, ::3],
        draw(4, 5, 6).permute(2, 0, 1),
        draw(7, 1, 9).transpose(0, 1),
    ]
    if special:
        tensors[4][:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 65504.0]).to(dtype)
        tensors[8][1, 2, 3, 4] = float("nan")
    return tensors


def offsets_of(tensors: list[Tensor], gap: int = 3) -> tuple[list[int], int]:
    offsets, end = [], 1
    for tensor in tensors:
        offsets.append(end)
        end += tensor.numel() + gap
    return offsets, end


def strided_like(tensor: Tensor, device: str) -> Tensor:
    """A copy on a device with the same strides: `.to` would make some of these contiguous."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def check_pack(device: str, source: torch.dtype, flat_dtype: torch.dtype, scale: float, special: bool = False) -> None:
    tensors = bucket_tensors(source, special)
    offsets, length = offsets_of(tensors)
    expected = torch.full((length,), 7.0, dtype=flat_dtype)
    reference.bucket_pack(tensors, offsets, expected, scale)
    flat = torch.full((length,), 7.0, dtype=flat_dtype, device=device)
    ops.bucket_pack([strided_like(t, device) for t in tensors], offsets, flat, scale)
    torch.testing.assert_close(flat.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def check_unpack(device: str, flat_dtype: torch.dtype, to: torch.dtype, scale: float, special: bool = False) -> None:
    tensors = bucket_tensors(to)
    offsets, length = offsets_of(tensors)
    flat = torch.randn(length, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(flat_dtype)
    flat[0] = float("nan")  # before the first offset: nobody reads it
    if special:
        flat[offsets[5] + 1000] = float("inf")
    expected = [strided_like(t, "cpu") for t in tensors]
    found = reference.bucket_unpack(flat, offsets, expected, scale)
    actual = [strided_like(t, device) for t in tensors]
    answer = ops.bucket_unpack(flat.to(device), offsets, actual, scale)
    assert answer.dtype == torch.float32
    assert answer.shape == ()
    assert answer.item() == found.item() == float(special)
    for one, two in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu(), two, rtol=0, atol=0, equal_nan=True)


def check_amax(device: str, dtype: torch.dtype) -> None:
    tensors = bucket_tensors(dtype)
    on_device = [strided_like(t, device) for t in tensors]
    assert ops.bucket_amax(on_device).item() == reference.bucket_amax(tensors).item() > 0
    assert ops.bucket_amax(on_device[1:2]).item() == 0.0
    for value in (-float("inf"), float("nan")):
        for index in (4, 8, 11):
            on_device[index][(0,) * on_device[index].dim()] = value
        largest = ops.bucket_amax(on_device).item()
        assert largest == float("inf") if value == -float("inf") else largest != largest


def loss_case(n: int, k: int, dtype: torch.dtype, layout: str, first_class: int) -> tuple[Tensor, Tensor, Tensor]:
    """(logits, target, class_weight): targets inside, outside on both sides, and ignored."""
    generator = torch.Generator().manual_seed(n * 1000 + k)

    def draw(*shape: int) -> Tensor:
        return (4 * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    logits = {
        "dense": lambda: draw(n, k),
        "wide rows": lambda: draw(n, k + 5)[:, 2 : k + 2],
        "transposed": lambda: draw(k, n).t(),
    }[layout]()
    target = torch.randint(first_class - 2, first_class + k + 2, (n,), generator=generator)
    target[::4] = -100
    return logits, target, torch.rand(k, generator=generator)


def put_specials(logits: Tensor) -> None:
    n, k = logits.shape
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        if row < n and k:
            logits[row, k // 2] = value
    if n > 3:
        logits[3] = -float("inf")


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 4e-6, "atol": 1e-5}


def check_stats(
    device: str, n: int, k: int, dtype: torch.dtype, *, layout: str = "dense", weighted: bool = False,
    smoothing: bool = True, special: bool = False, first_class: int = 7,
) -> None:  # fmt: skip
    logits, target, weight = loss_case(n, k, dtype, layout, first_class)
    if special:
        put_specials(logits)
    class_weight = weight if weighted else None
    expected = reference.softmax_stats(logits, target, first_class, class_weight, smoothing)
    actual = ops.softmax_stats(
        strided_like(logits, device), target.to(device), first_class,
        None if class_weight is None else class_weight.to(device), smoothing,
    )  # fmt: skip
    assert actual.shape == (4, n)
    assert actual.dtype == expected.dtype
    # Sums over k logits of size 4 round relative to what is summed, not to the sum.
    tolerance = _tolerance(dtype) | ({} if dtype == torch.float64 else {"atol": 1e-5 * max(1, k) ** 0.5})
    torch.testing.assert_close(actual.cpu(), expected, **tolerance, equal_nan=True)


def check_grad(
    device: str, n: int, k: int, dtype: torch.dtype, *, layout: str = "dense", weighted: bool = False,
    smoothing: bool = True, special: bool = False, inplace: bool = False, first_class: int = 7,
) -> None:  # fmt: skip
    logits, target, weight = loss_case(n, k, dtype, layout, first_class)
    stats = reference.softmax_stats(logits, target, first_class, None, False)
    lse = stats[0] + stats[1].log()
    if special:
        put_specials(logits)
        lse[::5] = float("inf")
    generator = torch.Generator().manual_seed(2)
    softmax, of_target, smooth = (torch.rand(n, generator=generator).to(stats.dtype) for _ in range(3))
    for coef in (softmax, of_target, smooth):
        coef[:n:3] = 0
    vectors = (softmax, of_target, smooth if smoothing else None)
    class_weight = weight if weighted else None
    expected = reference.softmax_grad(logits, lse, target, first_class, *vectors, class_weight)
    assert expected.is_contiguous()  # as the schema's fake says
    on_device = strided_like(logits, device)
    actual = ops.softmax_grad(
        on_device, lse.to(device), target.to(device), first_class,
        *(None if v is None else v.to(device) for v in (*vectors, class_weight)), inplace=inplace,
    )  # fmt: skip
    assert (actual is on_device) == inplace
    assert actual.dtype == dtype
    assert torch.equal(actual[::3].cpu(), torch.zeros_like(actual[::3].cpu()))
    ulp = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(dtype, 0.0)
    tolerance = _tolerance(dtype)
    torch.testing.assert_close(
        actual.cpu(), expected, rtol=max(tolerance["rtol"], ulp), atol=tolerance["atol"] / 10, equal_nan=True
    )
