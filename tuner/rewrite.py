"""Do the same with fewer and cheaper operations: what a compiler would do to a recorded list, without its seconds.

Stacks of small networks are bound by memory and by the number of calls. What is left out here changes no result; a bias
that is added within the matrix product changes rounding only. Measured: docs/measurements.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tuner.listing import Listing, Operation, Size, Slot, last_uses

aten = torch.ops.aten

ALIASES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
"""Operations that give their first argument as it is."""

RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default)
"""Operations that change nothing where the shape stays the same."""

CONSTANTS = (aten.scalar_tensor.default, aten.ones_like.default, aten.zeros_like.default)
"""Operations whose result depends on their arguments' form alone, and is kept where that is always the same."""

IN_PLACE = {
    getattr(getattr(aten, name), overload): getattr(getattr(aten, f"{name}_"), overload)
    for overload, names in {
        "default": "relu neg exp tanh sigmoid clamp_min leaky_relu elu gelu silu scatter_add",
        "Tensor": "add sub mul div",
        "Scalar": "add sub mul div",
    }.items()
    for name in names.split()
}
"""Operations that may write their result over their first argument, and the overloads that do."""

GRADIENTS = {
    getattr(aten, f"{name}_backward").default: getattr(aten, f"{name}_backward").grad_input
    for name in "threshold sigmoid tanh gelu silu leaky_relu".split()
}
"""The same, by an argument for the result."""


def rewrite(listing: Listing) -> Listing:
    """The same results by fewer operations; a list that writes into its arguments only loses what nobody uses."""
    if any(operation.writes for operation in listing.operations):
        return _without_unused(listing)
    listing = _without_unused(_without_repeats(_with_constants(_without_aliases(listing))))
    return _in_place(_without_unused(_with_biases(_without_turned_products(listing))))


def _renamed(value: Any, names: Mapping[int, int]) -> Any:
    return tree_map_only(Slot, lambda slot: Slot(names.get(slot.index, slot.index)), value, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Slot, Size))


def _rename(operation: Operation, names: Mapping[int, int]) -> Operation:
    return replace(operation, args=_renamed(operation.args, names), kwargs=_renamed(operation.kwargs, names))


def _without_aliases(listing: Listing) -> Listing:
    """Tensors that are another one under a second name."""
    names: dict[int, int] = {}
    kept = []
    for o in (_rename(o, names) for o in listing.operations):
        same = o.function in ALIASES or o.function in RESHAPES or (o.function is aten.mul.Scalar and o.args[1] == 1)
        if same and o.single and isinstance(o.args[0], Slot):
            before, after = listing.forms[o.args[0].index], listing.forms[o.results[0] or 0]
            if o.function in ALIASES or (before.shapes, before.dtype) == (after.shapes, after.dtype):
                names[o.results[0] or 0] = o.args[0].index
                continue
        kept.append(o)
    return replace(listing, operations=kept, results=[names.get(slot, slot) for slot in listing.results])


def _with_constants(listing: Listing) -> Listing:
    """Numbers that are the same at every call."""
    constants = dict(listing.constants)
    kept = []
    for o in listing.operations:
        fixed = not any(isinstance(leaf, Size) for leaf in tree_leaves((o.args, o.kwargs), is_leaf=_is_leaf))
        result = o.results[0] if o.function in CONSTANTS else None
        if fixed and result is not None and listing.forms[result].is_scalar:
            form = listing.forms[result]
            args = tree_map_only(Slot, lambda _: torch.empty((), dtype=form.dtype, device=form.device), o.args)  # noqa: B023
            constants[result] = o.function(*args, **o.kwargs)
            continue
        kept.append(o)
    return replace(listing, operations=kept, constants=constants)


def _without_repeats(listing: Listing) -> Listing:
    """What has been computed before, and a transposition that is taken back."""
    names: dict[int, int] = {}
    known: dict[str, int] = {}
    swapped: dict[int, tuple[int, frozenset[int]]] = {}
    kept = []
    for o in (_rename(o, names) for o in listing.operations):
        if o.draws or not o.single or o.results[0] is None:
            kept.append(o)
            continue
        result, key = o.results[0], f"{o.name} {o.args!r} {o.kwargs!r}"
        if o.function is aten.transpose.int:
            dimensions = len(listing.forms[result].shapes[0])
            pair = frozenset(d % dimensions for d in o.args[1:])
            key = f"{o.name} {o.args[0]!r} {sorted(pair)}"
            if swapped.get(o.args[0].index, (0, frozenset()))[1] == pair:
                names[result] = swapped[o.args[0].index][0]
                continue
            swapped[result] = (o.args[0].index, pair)
        if key in known:
            names[result] = known[key]
            continue
        known[key] = result
        kept.append(o)
    return replace(listing, operations=kept, results=[names.get(slot, slot) for slot in listing.results])


def _without_unused(listing: Listing) -> Listing:
    """Only what the results depend on, what writes, and what draws random numbers."""
    wanted, kept = set(listing.results), []
    for o in reversed(listing.operations):
        if o.writes or o.draws or not wanted.isdisjoint(o.results):
            kept.append(o)
            wanted.update(o.inputs)
    return replace(listing, operations=kept[::-1])


def _without_turned_products(listing: Listing) -> Listing:
    """A product that is transposed afterwards is the product of the transposed factors, in the other order.

    The gradient of a layer's weights comes out like that; transposed, its memory would be read across by the update.
    """
    counts = _counts(listing)
    forms = dict(listing.forms)
    sources = {o.results[0]: o.args[0] for o in listing.operations if _is_turn(o)}
    products = {o.results[0]: o for o in listing.operations if o.function is aten.bmm.default}
    kept: list[Operation] = []

    def turned(factor: Slot, like: Operation) -> Slot:
        if factor.index in sources:
            source: Slot = sources[factor.index]
            return source
        form = forms[factor.index]
        shapes, strides = (tuple((a, c, b) for a, b, c in part) for part in (form.shapes, form.strides))
        slot = max(forms) + 1
        forms[slot] = replace(form, shapes=shapes, strides=strides)
        kept.append(replace(like, args=(factor, 1, 2), results=(slot,)))
        return Slot(slot)

    for o in listing.operations:
        product = products.get(o.args[0].index) if _is_turn(o) else None
        if product is None or counts[o.args[0].index] > 1:
            kept.append(o)
            continue
        left, right = product.args
        kept.append(replace(product, args=(turned(right, o), turned(left, o)), results=o.results))
        forms[o.results[0] or 0] = replace(forms[o.results[0] or 0], whole=True)
    return _without_repeats(replace(listing, operations=kept, forms=forms))


def _is_turn(operation: Operation) -> bool:
    """Whether it transposes the matrices of a batch."""
    return operation.function is aten.transpose.int and {d % 3 for d in operation.args[1:]} == {1, 2}


def _counts(listing: Listing) -> dict[int, int]:
    """By slot, how often it is read or returned."""
    counts: dict[int, int] = {}
    for slot in [slot for o in listing.operations for slot in o.inputs] + list(listing.results):
        counts[slot] = counts.get(slot, 0) + 1
    return counts


def _with_biases(listing: Listing) -> Listing:
    """A matrix product that a bias is added to is one operation with it."""
    counts = _counts(listing)
    products: dict[int, Operation] = {}
    kept: list[Operation] = []
    for o in listing.operations:
        if o.function is aten.bmm.default and counts.get(o.results[0] or -1) == 1:
            products[o.results[0] or -1] = o
        if o.function is aten.add.Tensor and len(o.args) == 2 and not o.kwargs:
            for bias, product in (o.args, o.args[::-1]):
                if _is_bias(bias, product, products, listing):
                    args = (bias, *products[product.index].args)
                    kept.append(replace(o, function=aten.baddbmm.default, args=args))
                    break
            else:
                kept.append(o)
            continue
        kept.append(o)
    return replace(listing, operations=kept)


def _is_bias(bias: Any, product: Any, products: Mapping[int, Operation], listing: Listing) -> bool:
    if not isinstance(bias, Slot) or not isinstance(product, Slot) or product.index not in products:
        return False
    form, whole = listing.forms[bias.index], listing.forms[product.index]
    dimensions = {len(shape) for shape in form.shapes}
    pairs = [pair for shapes in zip(form.shapes, whole.shapes, strict=True) for pair in zip(*shapes, strict=False)]
    return dimensions == {3} and all(own in (1, other) for own, other in pairs) and form.dtype == whole.dtype


def _in_place(listing: Listing) -> Listing:
    """Results are written over tensors that nobody needs any more: what is in the cache already costs least."""
    uses = last_uses(listing.operations)
    own = {listing.forms[slot].storage for slot in listing.lasting}
    ends: dict[int, int] = {}
    for slot, at in uses.items():
        storage = listing.forms[slot].storage
        ends[storage] = max(at, ends.get(storage, 0))
    merged: dict[int, int] = {}
    kept: list[Operation] = []
    for at, o in enumerate(listing.operations):
        over = IN_PLACE.get(o.function) or GRADIENTS.get(o.function)
        if over is None or not o.single or o.results[0] is None or not isinstance(o.args[0], Slot):
            kept.append(o)
            continue
        target, result = listing.forms[o.args[0].index], listing.forms[o.results[0]]
        storage = merged.get(target.storage, target.storage)
        others = [slot for slot in o.inputs if slot != o.args[0].index]
        shared = any(merged.get(s := listing.forms[slot].storage, s) == storage for slot in others)
        alike = (target.shapes, target.strides, target.dtype) == (result.shapes, result.strides, result.dtype)
        if storage in own or shared or not alike or not target.whole or ends.get(storage, at) > at:
            kept.append(o)
            continue
        if o.function in GRADIENTS:
            kept.append(replace(o, function=over, kwargs={**o.kwargs, "grad_input": o.args[0]}))
        else:
            kept.append(replace(o, function=over))
        # From here on the result's memory is the target's: what it is needed for keeps both.
        merged[result.storage] = storage
        ends[storage] = ends.get(result.storage, at)
        if result.storage in own:
            own.add(storage)
    return replace(listing, operations=kept)
