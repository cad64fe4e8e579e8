"""Encodes plain data as JSON, for calls and results between a judge and its candidate.

Supports None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict, nested
at most NESTING deep. A subclass becomes its base, anything else an `Opaque`. Floats and integers
are hexadecimal: exact, and in time linear in their length.
"""

NESTING = 200
_SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


class Opaque:
    """Stands for a value that is not plain data; it equals nothing.

    Its truth value and inequality raise, so that no test passes because of a value it cannot see.
    """

    __hash__ = object.__hash__

    def __eq__(self, other):
        return False

    def __ne__(self, other):
        raise TypeError("a value that is not plain data is compared")

    def __bool__(self):
        raise TypeError("a value that is not plain data has no truth")


def encode(value: object, depth: int = 0) -> object:
    """Returns a value as JSON-able data.

    Raises:
      ValueError: nested too deeply.
    """
    if depth > NESTING:
        raise ValueError(f"nested more than {NESTING} deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return ["int", int.__format__(value, "x")]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, bytes):
        return ["bytes", bytes.hex(value)]
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return [name, *(encode(item, depth + 1) for item in kind.__iter__(value))]
    if isinstance(value, dict):
        pairs = [item for pair in dict.items(value) for item in pair]
        return ["dict", *(encode(item, depth + 1) for item in pairs)]
    return ["object"]


def decode(data: object, depth: int = 0) -> object:
    """Returns the value that was encoded.

    Raises:
      ValueError, TypeError: not an encoding, or of a value that cannot exist (an unhashable key).
    """
    if depth > NESTING:
        raise ValueError(f"nested more than {NESTING} deep")
    if data is None or isinstance(data, bool | str):
        return data
    if not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise ValueError("not an encoding of plain data")
    name, *items = data
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, depth + 1) for item in items)
    if name == "dict" and len(items) % 2 == 0:
        items = [decode(item, depth + 1) for item in items]
        return dict(zip(items[::2], items[1::2], strict=True))
    if not all(isinstance(item, str) for item in items):
        raise ValueError("not an encoding of plain data")
    match name, *items:
        case ["int", digits]:
            return int(digits, 16)
        case ["float", digits]:
            return float.fromhex(digits)
        case ["complex", real, imaginary]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["bytes", digits]:
            return bytes.fromhex(digits)
        case ["object"]:
            return Opaque()
    raise ValueError("not an encoding of plain data")
