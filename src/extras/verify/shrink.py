"""Makes a configuration small enough to check on a laptop: the same kinds of layers, with small sizes."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from src.config.attention_types import ATTENTION_TYPES, keys_of_type
from src.config.model_keys import Model
from src.config.requirements import LAYER_REQUIREMENTS
from src.config.schema import KEYS, MESH_AXES, Config, keys_of, size_key
from src.config.segments import check_model
from src.config.yaml import dump
from src.model.attention_kernels.delta_rule import CHUNK
from src.model.patterns import shortest_patterns
from src.model.spec import ModelSpec, layer_models, model_spec
from src.system.errors import UserError

# Keys that the result takes over besides the sections `model` and `step`; others have their defaults.
FURTHER = ("steps", "packing", "long_documents", "batch_transform", "mesh_axes", "logical_axis_rules")
# Keys that are set to their values in NEUTRAL; the report lists each that had neither this value nor its default.
LOST = ("quantization", "attention", "optimizer_memory_host_offload", "num_vocab_tiling", "mu_dtype")
LOST += ("remat_policy", "num_pipeline_microbatches", "num_pipeline_repeats")
LOST += ("load_parameters_path", "use_sft", "enable_rampup_batch_size", "eval_metrics", "compile_xla_flags")
NEUTRAL: dict[str, Any] = {key: KEYS[key].default for key in LOST} | {
    **dict.fromkeys(("dtype", "weight_dtype", "mu_dtype"), "float32"),
    **{"matmul_precision": "highest", "scan_layers": "true", "remat_policy": "none", "per_device_batch_size": 1.0},
    **{"global_parameter_scale": 1, "dataset_type": "synthetic", "enable_checkpointing": False, "log_internals": 0},
    **{size_key("dcn", axis): 1 for axis in MESH_AXES},
}
PORTABLE = ("dot_product", "blocked")  # values of `attention` that are kept: these kernels run on CPUs
AT_MOST = {"vocab_size": 97, "mtp_num_layers": 1, "gradient_accumulation_steps": 2, "lora_rank": 2, "shared_experts": 2}
# The sizes of layers, in families: the sizes of a family keep their order, and equal ones stay equal.
FAMILY = dict.fromkeys(("base_emb_dim", "base_mlp_dim", "base_moe_mlp_dim"), "widths")
FAMILY |= {"num_experts": "experts", "n_routing_groups": "experts"}
FAMILY |= {"attn_temperature_floor": "windows", "original_max_position_embeddings": "lengths"}
for _type in ATTENTION_TYPES.values():
    for _key in (name for name in KEYS if name in keys_of_type(_type) and type(KEYS[name].default) is int):
        FAMILY[_key] = "heads" if _key in _type.heads else "windows" if "window" in _key else "dims"
LOGICAL_AXES = {  # family: logical axes of the weights' dims that have its sizes
    **{"widths": ("embed", "expert_embed", "mlp"), "heads": ("heads", "kv_heads"), "experts": ("expert",)},
    **{"dims": ("head_dim", "latent"), "windows": (), "lengths": ()},
}
DERIVED = ("num_experts_per_tok", "topk_routing_group", "shared_experts", "query_pre_attn_scalar", "max_length")
DERIVED += ("rope_short_factor", "rope_long_factor", "shared_weights")
Sizes = dict[str, Any]


class Shrunk(NamedTuple):
    """A small configuration, and lines for a report."""

    config: Config
    kept: list[str]  # layers and sizes
    hidden: list[str]  # what the small configuration cannot show


def shrink(config: Config, length: int = 48, meshes: Sequence[Mapping[str, int]] = ()) -> Shrunk:
    """Shrinks a configuration to sequences of `length` tokens; raises UserError naming the rule that failed.

    Each mesh of `meshes` can shard the small sizes if it can shard the configuration's own.
    """
    model, step, spec = config.model, config.step, _spec(config)
    layers = [layer for layer, _ in layer_models(model)]
    base, *small_layers = _small_layers([model, *layers], length, _multiples(config, meshes))
    keys = {key: config[key] for key in (*keys_of("step"), *FURTHER)} | base | NEUTRAL | {"max_target_length": length}
    keys |= {key: min(config[key], most) for key, most in AT_MOST.items()}
    keys |= {"attention": step.attention} if step.attention in PORTABLE else {}
    keys["lora_alpha"] = step.lora_alpha * (keys["lora_rank"] / step.lora_rank if step.lora_rank else 1)
    if (rows := model.trainable_position_size) != -1:  # a table of positions may be longer than a sequence
        keys["trainable_position_size"] = length + 16 * (rows > config.batch.max_target_length)
    if step.mup_base_emb_dim:
        keys["mup_base_emb_dim"] = max(1, round(step.mup_base_emb_dim * base["base_emb_dim"] / model.emb_dim))
    facts = [{key: value for key, value in layer.items() if value != base[key]} for layer in small_layers]
    patterns = (step.trainable_parameters, step.lora_parameters, step.quantization_exclude, step.optimizer_rules)
    stages = math.lcm(2, *(mesh.get("stage", 1) for mesh in meshes))
    least = 2 if max(group.repeats for group in spec.layer_groups) % stages else stages
    segments = list(_segments(spec, facts, least, whole="segments" in str(patterns)))
    keys["base_num_decoder_layers"] = sum(entry["repeats"] * len(entry["pattern"]) for entry in segments)
    keys["decoder_segments"] = segments if model.decoder_segments else ()
    small = Config.of(keys)
    problems = check_model(small.model)
    if not problems and _kinds(_spec(small)) != _kinds(spec):
        problems = ["its small layers would be of other kinds, or in another order"]
    if problems:
        raise UserError(f"this configuration cannot be made small: {'; '.join(problems)}")
    kept = _kept(config, small, zip(layers, small_layers, strict=True))
    kept += _grown(shrink(config, length).config, small) if meshes else []
    return Shrunk(small, kept, _hidden(config, length))


def _multiples(config: Config, meshes: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Finds for each family a multiple of 4 and of the shards that each mesh divides its sizes into.

    A small size must have the same greatest common divisor with this number as the original size.
    """
    rules = config.mesh.logical_axis_rules
    shards = {
        family: [math.prod(mesh.get(name, 1) for name in rules[axis]) for mesh in meshes for axis in axes]
        for family, axes in LOGICAL_AXES.items()
    }
    return {family: math.lcm(4, *sizes) for family, sizes in shards.items()}


def _spec(config: Config) -> ModelSpec:
    return model_spec(config.model, config.step, config.batch.max_target_length)


def _kinds(spec: ModelSpec) -> list[dict[str, Any]]:
    """Describes each kind of layer in order of appearance; sizes, which shrink, only by whether they are above 1."""
    sizes = {key.removeprefix("base_") for key in (*FAMILY, *DERIVED)}
    kinds = [dict(vars(layer)) for layer in dict.fromkeys(spec.layers)]
    for kind in kinds:
        kind |= {name: kind[name] > 1 if type(kind[name]) is int else bool(kind[name]) for name in sizes}
    return kinds


def _segments(spec: ModelSpec, facts: Sequence[Sizes], least: int, whole: bool) -> Iterator[dict[str, Any]]:
    """Yields `decoder_segments` with the layer groups of `spec`, but few repeats; `facts` has each layer's own keys.

    The number of repeats is the first of a few, from `least` on and at most the group's own, with which the layers are
    still grouped like this. Patterns have each of their kinds of layers once, unless `whole` or that regroups layers.
    """
    starts = itertools.accumulate((len(group.pattern) * group.repeats for group in spec.layer_groups), initial=0)
    patterns = [[*range(at, at + len(group.pattern))] for at, group in zip(starts, spec.layer_groups, strict=False)]
    shorter = [sorted({spec.layers[at]: at for at in reversed(pattern)}.values()) for pattern in patterns]
    tried = (
        [(pattern, min(group.repeats, most)) for pattern, group in zip(chosen, spec.layer_groups, strict=True)]
        for chosen in ((patterns,) if whole else (shorter, patterns))
        for most in (least, least + 1, 2 * least, len(facts))
    )
    same_groups = (  # with few repeats, other groups may describe the layers in a shorter way
        groups
        for groups in tried
        if shortest_patterns([spec.layers[at] for pattern, repeats in groups for at in pattern * repeats])
        == tuple((len(pattern), repeats) for pattern, repeats in groups)
    )
    for pattern, repeats in next(same_groups):
        for shared, run in itertools.groupby(pattern, lambda at: bool(spec.layers[at].shared_weights)):
            yield {"repeats": repeats, "shared": shared, "pattern": [facts[at] for at in run]}


def _small_layers(layers: Sequence[Model], length: int, multiples: Mapping[str, int]) -> list[Sizes]:
    """Chooses the keys of the section `model` for each layer; the first of `layers` is the section itself.

    Raises UserError if no small sizes keep the equalities between sizes, or windows do not fit into `length`.
    """
    values: dict[str, set[int]] = {family: set() for family in FAMILY.values()}
    products: dict[int, tuple[int, int]] = {}  # width: the number of heads, and the size of each, whose product it is
    for layer in layers:
        sizes = {key: _size(layer, key) for key in _used(layer)}
        for key, size in sizes.items():
            values[FAMILY[key]].add(size)
        heads, dims = _heads(layer)
        products |= {sizes[heads] * sizes[dim]: (sizes[heads], sizes[dim]) for dim in dims if dim in sizes}
    shares = {layer.partial_rotary_factor for layer in layers if layer.position_type == "rope"}
    small = {
        "heads": _least(values["heads"], 2, multiple=multiples["heads"], divides=True),
        "experts": _least(values["experts"], 4, multiple=multiples["experts"], divides=True, grow=3),
        "windows": _least(values["windows"], length // 7, lambda new: length % new > 0, multiple=1),
        "lengths": _least(values["lengths"], length // 3, multiple=1),
    }
    for start in range(12, 65, 4):
        # Heads rotate a whole number of pairs, at least two.
        rotates = lambda new: all(new * share / 2 in range(2, new) for share in shares)  # noqa: E731
        small["dims"] = _least(values["dims"], start, rotates, multiples["dims"])
        same = {width: small["heads"][heads] * small["dims"][dim] for width, (heads, dim) in products.items()}
        small["widths"] = _least(values["widths"], 24, multiple=multiples["widths"], grow=1.5, starts=same)
        if all(same.get(width, new) == new for width, new in small["widths"].items()):
            break
    else:
        pairs = [f"{heads} heads of {dim} and the width {width}" for width, (heads, dim) in products.items()]
        raise UserError(f"this configuration cannot be made small: no small sizes have {' or '.join(pairs)} equal")
    if any(new >= length for family in ("windows", "lengths") for new in small[family].values()):
        raise UserError(f"this configuration cannot be made small: too many windows for {length} tokens")
    return [_small_layer(layer, small) for layer in layers]


def _heads(layer: Model) -> tuple[str, list[str]]:
    """Names the key of a layer's number of heads, and the keys of the sizes of its heads."""
    declared = ATTENTION_TYPES[layer.attention_type]
    return declared.heads[0], [key for key in keys_of_type(declared) if FAMILY.get(key) == "dims"]


def _small_layer(layer: Model, small: dict[str, dict[int, int]]) -> Sizes:
    """Looks up a layer's sizes in `small`, and derives the keys that depend on them."""
    keys: Sizes = {key: getattr(layer, key) for key in keys_of("model")}
    keys |= {key: small[family].get(_size(layer, key), keys[key]) for key, family in FAMILY.items()}
    groups, top_groups, top = layer.n_routing_groups, layer.topk_routing_group, layer.num_experts_per_tok
    keys["topk_routing_group"] = min(top_groups, 2) if top_groups < groups else keys["n_routing_groups"]
    candidates = keys["num_experts"] // keys["n_routing_groups"] * keys["topk_routing_group"]
    takes_all = top == layer.num_experts // groups * top_groups
    keys["num_experts_per_tok"] = candidates if takes_all else min(top, 2)
    if head := ATTENTION_TYPES[layer.attention_type].head_dim:
        parts = (head, "qk_nope_head_dim") if layer.attention_type == "mla" else (head,)
        if layer.query_pre_attn_scalar not in (0.0, 1.0):  # 1: scores are not scaled
            ratio = sum(keys[part] for part in parts) / sum(getattr(layer, part) for part in parts)
            scalar = layer.query_pre_attn_scalar
            keys["query_pre_attn_scalar"] = float(round(scalar * ratio)) if scalar == round(scalar) else scalar * ratio
        pairs = int(keys[head] * layer.partial_rotary_factor) // 2
        for key in ("rope_short_factor", "rope_long_factor") if layer.rope_type == "longrope" else ():
            keys[key] = tuple(keys[key][at * len(keys[key]) // pairs] for at in range(pairs))
    return keys


def _least(
    values: Set[int],
    start: int,
    fits: Callable[[int], bool] = bool,
    multiple: int = 4,
    divides: bool = False,
    grow: float = 1.0,
    starts: Mapping[int, int] = {},
) -> dict[int, int]:
    """Maps sizes to the smallest ones that `fits` accepts, in the same order.

    Each is at least its entry of `starts`, or `start`, and at least `grow` times the one before. It keeps its greatest
    common divisor with `multiple`; with `divides`, it stays divisible by sizes that divided it. A size stays as it is
    if no smaller one qualifies.
    """
    small: dict[int, int] = {}
    for old in sorted(values):
        at = max(starts.get(old, start), *(max(new + 1, math.ceil(new * grow)) for new in small.values()), 1)
        factors = [small[each] for each in small if divides and each and old % each == 0]
        choices = (new for new in range(at, old) if math.gcd(new, multiple) == math.gcd(old, multiple) and fits(new))
        small[old] = next((new for new in choices if not any(new % each for each in factors)), old)
    return small


def _used(layer: Model) -> list[str]:
    """Lists the keys of FAMILY that have an effect on a layer."""
    idle = {key for need in LAYER_REQUIREMENTS if not need.satisfied(vars(layer)) for key in need.keys}
    return [key for key in FAMILY if key not in idle]


def _size(layer: Model, key: str) -> int:
    """Reads a size of a layer as scaled by global_parameter_scale; 0 stays 0, also if it means another key's size."""
    return getattr(layer, key) and getattr(layer, key.removeprefix("base_"))


def _kept(config: Config, small: Config, layers: Iterator[tuple[Model, Sizes]]) -> list[str]:
    spec, small_spec = _spec(config), _spec(small)
    experts = "", " with experts"
    kinds = Counter(f"{it.attention_type} attention{experts[it.num_experts > 1]}" for it in dict.fromkeys(spec.layers))
    listed = ", ".join(kind + f" ({count} kinds)" * (count > 1) for kind, count in kinds.items())
    lines = [f"{len(small_spec.layers)} of {len(spec.layers)} layers, every kind kept: {listed}"]
    changed = {(key, keys[key], _size(layer, key)) for layer, keys in layers for key in _used(layer)}
    for family in dict.fromkeys(FAMILY.values()):
        sizes = [f"{key} {new} of {old}" for key, new, old in sorted(changed) if FAMILY[key] == family and new != old]
        lines += [f"{family}: {', '.join(sizes)}"] * bool(sizes)
    also = [key for key in ("max_target_length", *AT_MOST) if small[key] != config[key]]
    listed = ", ".join(f"{key} {small[key]} of {config[key]}" for key in also)
    return [*lines, f"{listed}; the vocabulary is padded to {small_spec.padded_vocab_size}"]


def _grown(plain: Config, grown: Config) -> list[str]:
    """Lists the sizes that are larger in `grown` than in `plain`, so that the meshes divide them."""
    layers = [[layer for layer, _ in layer_models(config.model)] for config in (plain, grown)]
    changed = [f"{len(layers[1])} layers, not {len(layers[0])}"] * (len(layers[0]) != len(layers[1]))
    for key in FAMILY:
        before, after = (sorted({_size(layer, key) for layer in each if key in _used(layer)}) for each in layers)
        changed += [f"{key} {new}, not {old}" for old, new in zip(before, after, strict=False) if old != new]
    return [f"grown until the mesh divides them: {', '.join(changed)}"] if changed else []


def _hidden(config: Config, length: int) -> list[str]:
    layers, step = _spec(config).layers, config.step
    lost = [key for key in LOST if config[key] not in (KEYS[key].default, NEUTRAL[key], *PORTABLE)]
    hidden = [f"{key}={dump(config[key])}: {dump(NEUTRAL[key]) if NEUTRAL[key] else 'off'} here" for key in lost]
    if "bfloat16" in (step.dtype, step.weight_dtype):
        hidden.append("rounding of bfloat16: float32 here")
    if length <= CHUNK and any(layer.attention_type == "gated_delta" for layer in layers):
        hidden.append(f"attention_type=gated_delta past its first {CHUNK} tokens: sequences are shorter here")
    if by_length := sorted({layer.rope_type for layer in layers if layer.max_length}):
        hidden.append(f"rope_type={by_length[0]} within the original length: sequences are longer here")
    return [*hidden, "kernels of TPUs and GPUs, and what depends on large sizes and meshes"]
