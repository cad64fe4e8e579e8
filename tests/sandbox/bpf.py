"""An interpreter of seccomp filters: classic BPF over one system call's data."""

import struct


def decide(program: bytes, architecture: int, number: int, arguments=()) -> int:
    """Returns the filter's verdict on a system call."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(word % 2**64 for word in words))
    code = list(struct.iter_unpack("<HBBI", program))
    index = accumulator = 0
    while True:
        operation, if_true, if_false, value = code[index]
        index += 1
        match operation:
            case 0x20:
                accumulator = struct.unpack_from("<I", data, value)[0]
            case 0x54:
                accumulator &= value
            case 0x15:
                index += if_true if accumulator == value else if_false
            case 0x35:
                index += if_true if accumulator >= value else if_false
            case 0x06:
                return value
            case _:
                raise AssertionError(f"operation {operation:#x}")
