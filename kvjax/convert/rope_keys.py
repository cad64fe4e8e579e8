"""RoPE's keys of a published config, as transformers 4 and 5 write them."""

from kvjax.foundation.errors import UserError
from kvjax.model.config import BlockConfig
from kvjax.published.config import PublishedConfig

SECTIONS = ("rope_scaling", "rope_parameters")  # transformers 4 and 5
_TYPE = ("rope_type", "type")  # the key's current and former name
_KEYS = frozenset(
    "rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor "
    "original_max_position_embeddings "
    # Keys of unsupported scalings, which transformers ignores beside a supported one.
    "attention_factor beta_fast beta_slow short_factor long_factor mscale mscale_all_dim".split()
)


def read(c: PublishedConfig) -> dict:
    """Returns BlockConfig's keys of RoPE, from one section or from both if they agree."""
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
    if scaling.values.get("rope_type") == "linear" and scaling.values.get("factor") == 1:
        scaled = False
    else:
        scaled = scaling.one_of("rope_type", dict(default=False, llama3=True), "default")
    if scaling.number("partial_rotary_factor", 1.0) != 1:
        raise scaling.error("partial_rotary_factor", "must be 1: RoPE rotates all channels")
    keys = dict(rope_base=scaling.number("rope_theta", 10_000.0))
    if scaled:
        keys |= dict(
            rope_factor=scaling.number("factor"),
            rope_low=scaling.number("low_freq_factor"),
            rope_high=scaling.number("high_freq_factor"),
            rope_original=scaling.integer("original_max_position_embeddings"),
        )
    return keys


def _section(c: PublishedConfig, section: str) -> dict[str, tuple[str, object]]:
    """Returns the non-null keys of a RoPE section: by name, the full key and the value."""
    values = {name: value for name, value in c.section(section).items() if value is not None}
    if any(isinstance(value, dict) for value in values.values()):
        raise c.error(section, "layers differ in their angles; kvjax needs equal layers")
    if unknown := set(values) - _KEYS - {*_TYPE}:
        raise c.error(section, f"{min(unknown)} is unknown, and may change the angles")
    types = {name: values.pop(name) for name in _TYPE if name in values}
    if len({*map(repr, types.values())}) > 1:
        raise c.error(section, "rope_type and type are two names of one key: give one of them")
    if not types and (unclear := set(values) - {"rope_theta", "partial_rotary_factor"}):
        raise c.error(
            section,
            f"{section}.rope_type is missing, which defines {min(unclear)}: give 'default' (no "
            "scaling) or 'llama3', as the model was trained",
        )
    keys = {name: (f"{section}.{name}", value) for name, value in values.items()}
    for name, kind in types.items():
        keys.setdefault("rope_type", (f"{section}.{name}", kind))
    return keys


def write(block: BlockConfig) -> dict:
    """Returns a config's keys of RoPE, for transformers 4 and 5."""
    scaling = None
    if block.rope_factor != 1:
        scaling = dict(
            rope_type="llama3",
            factor=block.rope_factor,
            low_freq_factor=block.rope_low,
            high_freq_factor=block.rope_high,
            original_max_position_embeddings=block.rope_original,
        )
    angles = (scaling or dict(rope_type="default")) | dict(rope_theta=block.rope_base)
    return dict(rope_parameters=angles, rope_theta=block.rope_base, rope_scaling=scaling)
