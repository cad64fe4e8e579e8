"""One look for every picture: a colour per mechanism, and matplotlib's parameters.

A notebook begins with

    from kvjax.foundation import theme; theme.notebook()

A mechanism has the same colour in all figures.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import re
import threading

INK, GRAY, LINE = "#1f2328", "#59636e", "#d1d9e0"
FAINT, MISSING, MIXED = "#d8dce1", "#b8bec6", "#8ea9c8"  # areas behind text
# Related mechanisms have related hues. All are dark enough for lines on white.
COLORS: Mapping[str, str] = {
    "mha": "#2f5f9e",
    "gqa": "#2391d0",
    "mqa": "#7391b0",
    "lrkv": "#e06900",
    "lrkv_gqa": "#a8430a",
    "thin_keys": "#7d5a00",
    "factored": "#b58200",
    "kv_tied": "#3d3d3d",
    "qk_tied": "#6b6f76",
    "qkv_tied": "#a0836a",
    "mla": "#1d8a4e",
    "mla_paper": "#64991a",
    "mla_lrkv": "#5c6b00",
    "gla": "#0f9d94",
    "mlra": "#0a5c56",
    "gta": "#c2478f",
    "shared_kv": "#e8577c",
    "mfa": "#5b4fc4",
    "mfa_kr": "#a35bd6",
    "tpa": "#b01e2e",
}
# Other names of mechanisms, and names whose first words `mechanism` would take for another one.
_ALIASES = {
    "kv_tied_gqa": "kv_tied",
    "kv_tied_mqa": "kv_tied",
    "lrkv_r0": "mqa",
    "lrkv_x_gqa": "lrkv_gqa",
    "mla_without_rope_key": "mla_paper",
    "q=k=v": "qkv_tied",
    "q=k_v": "qk_tied",
    "q_gqa": "kv_tied",
    "q_k=v": "kv_tied",
    "q_mqa": "kv_tied",
    "qkv": "mha",
    "thin": "thin_keys",
}
# Words that may follow a mechanism's name: scales, ranks, latents, numbers of heads, variants.
_VARIANT = re.compile(
    r"tiny|narrow|wide|served|matched|plus|without|no|norm|rope|shared|ranks|text|kv|only|"
    r"[lr]?\d+[bmk]?|\d+p\d+b"
)
# For series that are not mechanisms: Okabe and Ito's colours that are dark enough for lines.
SERIES = ("#0072b2", "#d55e00", "#008a64", "#b0508f", "#3d3d3d", "#9a7400", "#5f5fc4", "#a11d1d")
MARKERS = "osD^vPX*"
DASHES = ("-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.5, 1.4, 1.5)))
STYLE: Mapping[str, object] = {
    "text.parse_math": False,  # names may hold $
    "font.size": 11.5,
    "axes.titlesize": 12,
    "axes.labelsize": 12,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRAY,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "legend.frameon": False,
}
_NOTEBOOK: Mapping[str, object] = {
    "text.parse_math": True,
    "figure.dpi": 88,  # a notebook with eight figures stays below 400 kB
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10.5,
    "axes.grid": True,
    "legend.fontsize": 9.5,
}
_STYLING = threading.Lock()  # matplotlib's parameters are global


def mechanism(name: str) -> str | None:
    """Returns the key of `COLORS` that a config's or a variant's name stands for, if any.

    "lrkv_2p5b", "LRKV without RoPE", "GQA-6" and "mla_lrkv_narrow" are names of mechanisms;
    "lrkv_tiny: keys" is not.
    """
    parts = re.split(r"[\s_\-]+", re.sub("[()+]", "", name.lower().strip()))
    for count in range(min(len(parts), 4), 0, -1):
        name = "_".join(parts[:count])
        plain = name.rstrip("0123456789")  # gqa9, mlra4
        key = _ALIASES.get(name) or _ALIASES.get(plain, plain)
        if key in COLORS:
            return key if all(map(_VARIANT.fullmatch, parts[count:])) else None
    return None


def color(name: str) -> str:
    """Returns the colour of a mechanism by any of its names; gray for other names."""
    return COLORS.get(mechanism(name) or "", GRAY)


def colors(names: Sequence[str], mechanisms: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a colour for each series; if many are not mechanisms, these get ordered shades.

    Args:
      mechanisms: the key of `COLORS` by series, for series whose name is not a mechanism's.
    """
    known = {name: (mechanisms or {}).get(name) or mechanism(name) for name in names}
    known = {name: COLORS[key] for name, key in known.items() if key in COLORS}
    others = [name for name in names if name not in known]
    unused = [color for color in SERIES if color not in known.values()]
    if len(others) > len(unused):
        import matplotlib

        shades = matplotlib.colormaps["viridis"]
        unused = [
            matplotlib.colors.to_hex(shades(0.85 * i / (len(others) - 1)))
            for i in range(len(others))
        ]
    return {name: known.get(name) or unused[others.index(name)] for name in names}


def notebook() -> None:
    """Sets the look of a notebook's figures."""
    import matplotlib
    from matplotlib import style

    style.use("default")
    cycle = matplotlib.cycler(color=SERIES)
    matplotlib.rcParams.update(dict(STYLE) | dict(_NOTEBOOK) | {"axes.prop_cycle": cycle})


@contextlib.contextmanager
def styled(**more: object) -> Iterator[None]:
    """Sets the common look for figures drawn in the block, instead of the process's own style.

    Args:
      more: further parameters, with "__" for a dot.
    """
    import matplotlib
    from matplotlib import style

    changed = {key.replace("__", "."): value for key, value in more.items()}
    changed |= {"axes.prop_cycle": matplotlib.cycler(color=SERIES)}
    with _STYLING, style.context(["default", dict(STYLE) | changed]):
        yield
