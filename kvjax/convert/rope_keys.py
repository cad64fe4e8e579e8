"""Reads and writes RoPE's keys in published configs, in the forms of transformers 4 and 5."""

from collections.abc import Callable
import functools
import math
from typing import NamedTuple

from kvjax.convert import windows
from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from kvjax.published.config import PublishedConfig

SECTIONS = ("rope_scaling", "rope_parameters")  # transformers 4 and 5
_TYPE = ("rope_type", "type")  # the key's current and former name
_LONG = ("longrope", "su")  # LongRoPE's current and former name
_MSCALES = ("mscale", "mscale_all_dim")  # of YaRN in DeepSeek
_KEYS = frozenset(
    "rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings attention_factor beta_fast beta_slow "
    # Keys of unsupported scalings, which transformers ignores beside a supported one.
    "short_factor long_factor".split()
) | {*_MSCALES}


class RopeKeys(NamedTuple):
    """The keys by which a family's config.json describes RoPE.

    Attributes:
      read: returns keys of BlockConfig for a published config, given whether layers have windows.
      write: returns keys of config.json.
      keys: keys that are read besides those of every family.
    """

    read: Callable[[PublishedConfig, bool], dict]
    write: Callable[[BlockConfig], dict]
    keys: frozenset[str] = frozenset()


def read(c: PublishedConfig, *, base: float = 10_000.0, yarn: bool = True) -> dict:
    """Returns BlockConfig's keys of RoPE, from one section or from both if they agree.

    Args:
      base: default of rope_theta.
      yarn: the type "yarn" means YaRN; False: it means LongRoPE, and is refused.
    """
    keys_by_name = {}  # name: (full key, value)

    def add(name: str, key: str, value) -> None:
        other, other_value = keys_by_name.setdefault(name, (key, value))
        if other_value != value:
            raise UserError(
                f"{c.source}: {key} = {value!r} contradicts {other} = {other_value!r}: keep the "
                "one that the model was trained with"
            )

    if "rope_theta" in c.values:
        add("rope_theta", "rope_theta", c.number("rope_theta"))
    for section in SECTIONS:
        for name, (key, value) in _section(c, section).items():
            add(name, key, value)
    section = SECTIONS[0] if c.section(SECTIONS[0]) else SECTIONS[1]
    names = {name: f"{section}.{name}" for name in _KEYS}
    names |= {name: key for name, (key, _) in keys_by_name.items()}
    scaling = PublishedConfig(
        {name: value for name, (_, value) in keys_by_name.items()}, c.source, names
    )
    if scaling.values.get("rope_type") in _LONG:
        raise scaling.error(
            "rope_type",
            "is not supported: past original_max_position_embeddings tokens, all keys of a text "
            "change their frequencies, even those already cached",
        )
    if not yarn and scaling.values.get("rope_type") == "yarn":
        raise scaling.error("rope_type", "is not supported: this family's YaRN is LongRoPE")
    kinds = ("default", "llama3", "linear", "yarn")
    kind = scaling.one_of("rope_type", {name: name for name in kinds}, "default")
    if scaling.number("partial_rotary_factor", 1.0) != 1:
        raise scaling.error("partial_rotary_factor", "must be 1: RoPE rotates all channels")
    return dict(rope_base=scaling.number("rope_theta", base)) | _scaling(scaling, kind)


def _scaling(scaling: PublishedConfig, kind: str) -> dict:
    """Returns BlockConfig's keys of a RoPE scaling."""
    if kind == "default":
        return {}
    for name in _MSCALES:
        if name in scaling.values:
            if kind == "yarn":
                raise scaling.error(name, "is not read: give attention_factor, which it determines")
            raise scaling.error(name, f"multiplies the logits: not supported with {kind!r}")
    factor = scaling.number("factor")
    if kind == "linear":
        return dict(rope_factor=factor, rope_scaling=kind) if factor != 1 else {}
    keys = dict(
        rope_factor=factor,
        rope_scaling=kind,
        rope_original=scaling.integer("original_max_position_embeddings"),
    )
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        return keys | dict(rope_low=low, rope_high=high)
    attention_factor = scaling.number("attention_factor", _attention_factor(factor))
    if factor == attention_factor == 1:
        return {}
    return keys | dict(
        rope_attention_factor=attention_factor,
        rope_low=scaling.number("beta_slow", 1.0),
        rope_high=scaling.number("beta_fast", 32.0),
    )


def _section(c: PublishedConfig, section: str) -> dict[str, tuple[str, object]]:
    """Returns the full key and value, by name, of a RoPE section's keys that are not null."""
    values = {name: value for name, value in c.section(section).items() if value is not None}
    if any(isinstance(value, dict) for value in values.values()):
        raise c.error(section, "layers of this family do not differ in their angles")
    if unknown := set(values) - _KEYS - {*_TYPE}:
        raise c.error(section, f"{min(unknown)} is unknown, and may change the angles")
    types = {name: values.pop(name) for name in _TYPE if name in values}
    if len({*map(repr, types.values())}) > 1:
        raise c.error(section, "rope_type and type are two names of one key: give one of them")
    if not types and (unclear := set(values) - {"rope_theta", "partial_rotary_factor"}):
        raise c.error(
            section,
            f"{section}.rope_type is missing, which defines {min(unclear)}: give 'default' (no "
            "scaling), 'llama3' or another, as the model was trained",
        )
    keys = {name: (f"{section}.{name}", value) for name, value in values.items()}
    for name, kind in types.items():
        keys.setdefault("rope_type", (f"{section}.{name}", kind))
    return keys


def write(block: BlockConfig) -> dict:
    """Returns config.json's keys of RoPE, for transformers 4 and 5."""
    scaling = _written_scaling(block)
    angles = (scaling or dict(rope_type="default")) | dict(rope_theta=block.rope_base)
    return dict(rope_parameters=angles, rope_theta=block.rope_base, rope_scaling=scaling)


def _written_scaling(block: BlockConfig) -> dict | None:
    """Returns config.json's keys of a RoPE scaling, or None without one."""
    if block.rope_factor == 1 and block.rope_attention_factor == 1:
        return None
    scaling = dict(rope_type=block.rope_scaling, factor=block.rope_factor)
    if block.rope_scaling == "linear":
        return scaling
    scaling |= dict(original_max_position_embeddings=block.rope_original)
    if block.rope_scaling == "llama3":
        return scaling | dict(low_freq_factor=block.rope_low, high_freq_factor=block.rope_high)
    scaling |= dict(beta_slow=block.rope_low, beta_fast=block.rope_high)
    if block.rope_attention_factor == _attention_factor(block.rope_factor):
        return scaling
    return scaling | dict(attention_factor=block.rope_attention_factor)


def _attention_factor(factor: float) -> float:
    """Returns YaRN's default of attention_factor."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


# -- families whose layers differ ------------------------------------------------------------------


def _read_flat(c: PublishedConfig, has_window: bool) -> dict:
    del has_window
    return read(c)


def _read_phi3(c: PublishedConfig, has_window: bool) -> dict:
    del has_window
    return read(c, yarn=False)  # transformers reads Phi-3's "yarn" as LongRoPE


def _read_smollm3(c: PublishedConfig, has_window: bool) -> dict:
    del has_window
    keys, rotated = read(c, base=2_000_000.0), tuple(windows.no_rope_layers(c))
    return keys if all(rotated) else keys | dict(rope_layers=rotated)


def _write_smollm3(block: BlockConfig) -> dict:
    rotated = list(block.rope_layers or (1,) * block.num_layers)
    return write(block) | dict(no_rope_layers=rotated)


def _read_by_type(
    c: PublishedConfig, has_window: bool, *, base: float, local_base: float, local_key: str
) -> dict:
    """Returns BlockConfig's keys of a family in which layers with a window have their own base.

    Only layers without a window have a scaling.

    Args:
      base, local_base: default bases of layers without and with a window.
      local_key: key of the latter in transformers 4; "": rope_theta.
    """
    sections, local = c.section("rope_parameters"), None
    if sections:
        if not {*sections} <= {windows.FULL, windows.SLIDING}:
            raise c.error("rope_parameters", f"must have {windows.FULL} and {windows.SLIDING}")
        names = {name: f"rope_parameters.{name}" for name in sections}
        by_type = PublishedConfig(sections, c.source, names)
        local = _local_base(c, by_type.section(windows.SLIDING))
        full = dict(rope_parameters=by_type.section(windows.FULL))
        c = PublishedConfig(c.values | full, c.source)
    keys = read(c, base=base)
    if not has_window:
        return keys
    if local is not None and local_key in c.values and c.number(local_key) != local:
        raise c.error(
            local_key,
            f"contradicts rope_parameters.{windows.SLIDING}.rope_theta = {local:g}: keep the one "
            "that the model was trained with",
        )
    if local is None and local_key:
        local = c.number(local_key, local_base)
    elif local is None:
        local = keys["rope_base"]
        if local != local_base:
            raise c.error(
                "rope_theta",
                "transformers 4 and 5 differ in the base of layers with a window, unless it is "
                f"{local_base:g}: give the bases in rope_parameters",
            )
    same = keys == dict(rope_base=local)
    return keys if same else keys | dict(window_rope_base=local)


def _local_base(c: PublishedConfig, section: dict) -> float | None:
    """Returns rope_theta of the layers with a window, which have no scaling."""
    name = f"rope_parameters.{windows.SLIDING}"
    of_section = PublishedConfig(section, c.source, {key: f"{name}.{key}" for key in section})
    if unknown := {*of_section.values} - {"rope_type", "rope_theta"}:
        raise of_section.error(min(unknown), "layers with a window have no scaling")
    of_section.one_of("rope_type", dict(default=True), "default")
    return of_section.number("rope_theta") if "rope_theta" in section else None


def _write_by_type(block: BlockConfig, *, local_key: str = "") -> dict:
    local = block.window_rope_base or block.rope_base
    keys = write(block)
    keys["rope_parameters"] = {
        windows.FULL: keys["rope_parameters"],
        windows.SLIDING: dict(rope_type="default", rope_theta=local),
    }
    return keys | ({local_key: local} if local_key else {})


FLAT = RopeKeys(_read_flat, write)
PHI3 = RopeKeys(_read_phi3, write)
SMOLLM3 = RopeKeys(
    _read_smollm3, _write_smollm3, frozenset({"no_rope_layers", "no_rope_layer_interval"})
)
OLMO3 = RopeKeys(
    functools.partial(_read_by_type, base=500_000.0, local_base=500_000.0, local_key=""),
    _write_by_type,
)
_LOCAL_KEY = "rope_local_base_freq"
GEMMA3 = RopeKeys(
    functools.partial(_read_by_type, base=1_000_000.0, local_base=10_000.0, local_key=_LOCAL_KEY),
    functools.partial(_write_by_type, local_key=_LOCAL_KEY),
    frozenset({_LOCAL_KEY}),
)
