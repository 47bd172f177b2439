"""A picture of a few colours, and PNG files of it (https://www.w3.org/TR/png-3/), with the standard library alone."""
import struct
import zlib
from typing import Dict, List, Sequence, Tuple

Colour = Tuple[int, int, int]

# Letters of 5 by 7 dots, a row as five bits. What is not here is drawn as a space.
_LETTERS = """
0 0E 11 13 15 19 11 0E
1 04 0C 04 04 04 04 0E
2 0E 11 01 02 04 08 1F
3 1F 02 04 02 01 11 0E
4 02 06 0A 12 1F 02 02
5 1F 10 1E 01 01 11 0E
6 06 08 10 1E 11 11 0E
7 1F 01 02 04 08 08 08
8 0E 11 11 0E 11 11 0E
9 0E 11 11 0F 01 02 0C
. 00 00 00 00 00 0C 0C
: 00 0C 0C 00 0C 0C 00
- 00 00 00 1F 00 00 00
B 1E 11 11 1E 11 11 1E
G 0E 11 10 17 11 11 0F
K 11 12 14 18 14 12 11
M 11 1B 15 15 11 11 11
P 1E 11 11 1E 10 10 10
T 1F 04 04 04 04 04 04
a 00 00 0E 01 0F 11 0F
b 10 10 16 19 11 11 1E
c 00 00 0E 10 10 11 0E
d 01 01 0D 13 11 11 0F
e 00 00 0E 11 1F 10 0E
f 06 09 08 1C 08 08 08
g 00 0F 11 11 0F 01 0E
h 10 10 16 19 11 11 11
i 04 00 0C 04 04 04 0E
k 10 10 12 14 18 14 12
l 0C 04 04 04 04 04 0E
m 00 00 1A 15 15 11 11
n 00 00 16 19 11 11 11
o 00 00 0E 11 11 11 0E
p 00 00 1E 11 1E 10 10
r 00 00 16 19 10 10 10
s 00 00 0E 10 0E 01 1E
t 08 08 1C 08 08 09 06
u 00 00 11 11 11 13 0D
v 00 00 11 11 11 0A 04
w 00 00 11 11 15 15 0A
y 00 00 11 11 0F 01 0E
µ 00 00 11 11 13 1D 10
"""
_DOTS: Dict[str, List[int]] = {
    letter: [int(row, 16) for row in rows] for letter, *rows in (line.split() for line in _LETTERS.split("\n") if line)
}
# Pixels of a dot, and dots of a letter with the gap behind it.
_DOT, _ADVANCE = 2, 6


class Canvas:
    """Pixels as numbers of colours. The first colour is the paper's."""

    def __init__(self, width: int, height: int, colours: Sequence[Colour]) -> None:
        self.width, self.height, self.colours = width, height, colours
        self.pixels = bytearray(width * height)

    def fill(self, left: int, top: int, right: int, bottom: int, colour: int) -> None:
        """A rectangle, without its right and bottom edges."""
        left, right = max(left, 0), min(right, self.width)
        row = bytes([colour]) * (right - left)
        for y in range(max(top, 0), min(bottom, self.height)):
            self.pixels[y * self.width + left : y * self.width + right] = row

    def write(self, left: int, top: int, text: str, colour: int) -> int:
        """Text, and where it ends."""
        for letter in text:
            for row, dots in enumerate(_DOTS.get(letter, ())):
                for column in range(5):
                    if dots >> (4 - column) & 1:
                        x, y = left + column * _DOT, top + row * _DOT
                        self.fill(x, y, x + _DOT, y + _DOT, colour)
            left += _ADVANCE * _DOT
        return left

    def write_before(self, right: int, top: int, text: str, colour: int) -> None:
        """Text that ends there."""
        self.write(right - self.width_of(text), top, text, colour)

    def width_of(self, text: str) -> int:
        """Of a text, in pixels."""
        return len(text) * _ADVANCE * _DOT

    def png(self) -> bytes:
        """The file."""
        rows = (bytes(self.pixels[y * self.width : (y + 1) * self.width]) for y in range(self.height))
        # Before each row stands that it is not filtered.
        packed = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 3, 0, 0, 0)
        palette = bytes(part for colour in self.colours for part in colour)
        parts = [(b"IHDR", head), (b"PLTE", palette), (b"IDAT", packed), (b"IEND", b"")]
        return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, parts))


def _chunk(part: Tuple[bytes, bytes]) -> bytes:
    kind, data = part
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
