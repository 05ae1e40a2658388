"""Files of an adapter, damaged in ways that are drawn from a seed."""

from __future__ import annotations

import json
import random
import struct
import sys
from pathlib import Path
from typing import Any

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def any_value(chance: random.Random, depth: int = 0) -> Any:
    """A JSON value such as nobody expects."""
    plain = [None, True, False, 0, -1, 1, 7, 2**29, 2**31, 2**63, 10**30, 10**400, -(10**30), 0.5, 1e308, -0.0, 1e-300]
    plain += [float("nan"), float("inf"), "", "a", "x" * 2000, "\x00", "\x1b[2J", "‮", "../../etc/passwd", "FOCUS"]
    plain += ["(([a-z_0-9]+)+\\.?)+!", "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\\1m\\2o", "(" * 300, "[", ".*", "all-linear"]
    if depth < 3 and chance.random() < 0.3:
        size = chance.choice([0, 1, 3, 300])
        if chance.random() < 0.5:
            return [any_value(chance, depth + 1) for _ in range(size)]
        return {str(any_value(chance, 3)): any_value(chance, depth + 1) for _ in range(size)}
    return chance.choice(plain)


def mutate_bytes(chance: random.Random, data: bytes) -> bytes:
    """Some bytes changed, taken out, put in, repeated, or cut off."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 30])):
        at = chance.randrange(max(1, min(len(changed), chance.choice([8, 1500, len(data) or 1]))))
        match chance.randrange(5):
            case 0 if changed:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at:at] = chance.randbytes(chance.choice([1, 4, 100]))
            case 2:
                del changed[at : at + chance.choice([1, 8, 500])]
            case 3:
                changed[at:at] = changed[at : at + 50]
            case 4 if chance.random() < 0.3:
                del changed[at:]
    return bytes(changed)


def mutate_header(chance: random.Random, data: bytes, foreign: list[tuple[str, list[int]]]) -> bytes:
    """The table of a safetensors file changed: names, types, shapes, offsets; and tensors put in that fit the base."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    for _ in range(chance.choice([1, 1, 2])):
        names = [name for name, entry in header.items() if name != "__metadata__" and isinstance(entry, dict)]
        name = chance.choice(names)
        entry = header[name]
        match chance.randrange(8):
            case 0:
                new, shape = chance.choice(foreign)
                size = 4
                for dimension in shape:
                    size *= dimension
                header[new] = {"dtype": "F32", "shape": shape, "data_offsets": [len(body), len(body) + size]}
                body += struct.pack("<f", 7.0) * (size // 4)
            case 1:
                header[
                    chance.choice([f"evil.{name}", name[3:], name + ".default", name.replace("0", "77"), "\n\x1b[31m"])
                ] = header.pop(name)
            case 2:
                entry["dtype"] = chance.choice(["F16", "BF16", "I32", "BOOL", "F8_E4M3", "F64", "X", 7, None])
            case 3:
                entry["shape"] = chance.choice(
                    [[], [1], [-1, 32], [2**62, 2], list(entry.get("shape") or [3])[::-1], [0], "32", None]
                )
            case 4:
                entry["data_offsets"] = chance.choice([[0, 0], [0, 2**60], [8, 4], [-8, 0], [1.5, 2], [], None])
            case 5:
                del header[name]
            case 6:
                header["__metadata__"] = any_value(chance)
            case 7:
                header[name] = any_value(chance)
    table = json.dumps(header).encode()
    return struct.pack("<Q", chance.choice([len(table)] * 8 + [0, 2**40, len(table) + 9])) + table + body


def mutate_numbers(chance: random.Random, data: bytes) -> bytes:
    """Numbers of the tensors set to what numbers can be; or a tensor made of numbers of twice the length."""
    length = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    header.pop("__metadata__", None)
    size, code, large = (2, "e", 6e4) if next(iter(header.values()))["dtype"] == "F16" else (4, "f", 1e38)
    special = [float("nan"), float("inf"), -float("inf"), large, -large, 0.0, 1e-7]
    if chance.random() < 0.2:
        entry = chance.choice(list(header.values()))
        count = (entry["data_offsets"][1] - entry["data_offsets"][0]) // size
        entry |= {"dtype": "F64", "data_offsets": [len(body), len(body) + 8 * count]}
        return _put_together(header, body + struct.pack(f"<{count}d", *[chance.choice([1.0, 1e5, 1e300])] * count))
    for _ in range(chance.choice([1, 5, 200])):
        at = size * chance.randrange(len(body) // size)
        body[at : at + size] = struct.pack(f"<{code}", chance.choice(special))
    return _put_together(header, body)


def _put_together(header: dict[str, Any], body: bytes) -> bytes:
    """A safetensors file of these tensors, whose parts of ``body`` are moved so that there is nothing between them."""
    parts = []
    for entry in header.values():
        start, end = entry["data_offsets"]
        at = sum(map(len, parts))
        parts.append(bytes(body[start:end]))
        entry["data_offsets"] = [at, at + end - start]
    table = json.dumps(header).encode()
    return struct.pack("<Q", len(table)) + table + b"".join(parts)


def mutate_config(chance: random.Random, data: bytes) -> bytes:
    """Values of the configuration changed, taken out or put in, or its text damaged."""
    values = json.loads(data)
    match chance.randrange(8):
        case 0:
            return mutate_bytes(chance, data)
        case 1 if chance.random() < 0.2:
            depth = chance.choice([500, 5_000, 100_000])
            return json.dumps(values).encode()[:-1] + b', "deep": ' + b"[" * depth + b"]" * depth + b"}"
        case 2:
            values.pop(chance.choice(sorted(values)))
        case 3:
            values[str(any_value(chance, 3))] = any_value(chance)
        case _:
            for _ in range(chance.choice([1, 1, 1, 3])):
                values[chance.choice(sorted(values))] = any_value(chance)
    sys.set_int_max_str_digits(0)
    return json.dumps(values).encode()


def mutate(seed: int, origin: Path, target: Path, foreign: list[tuple[str, list[int]]]) -> str:
    """Write a mutated copy of an adapter; returns what was done to it."""
    chance = random.Random(seed)
    files = {name: (origin / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    kind = chance.choice(["bytes", "header", "header", "numbers", "config", "config", "config"])
    if kind == "bytes":
        files[WEIGHTS] = mutate_bytes(chance, files[WEIGHTS])
    elif kind == "header":
        files[WEIGHTS] = mutate_header(chance, files[WEIGHTS], foreign)
    elif kind == "numbers":
        files[WEIGHTS] = mutate_numbers(chance, files[WEIGHTS])
    else:
        files[CONFIG] = mutate_config(chance, files[CONFIG])
    if chance.random() < 0.02:
        files[chance.choice(["adapter_model.bin", "training_args.bin", "notes.txt"])] = b"\x80\x04"
    for name, data in files.items():
        (target / name).write_bytes(data)
    return kind
