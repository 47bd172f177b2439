#!/usr/bin/env python3
"""book.py FOLDER: every link of the built book leads to a file of it, and to a heading that is there. Exit status 1 where one does not."""
import html.parser, os, sys, urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.names = [], set()
        with open(path, encoding="utf-8") as file:
            self.feed(file.read())

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.names.add(known.get("id"))
        self.links += [known[name] for name in ("href", "src") if known.get(name)]


folder = os.path.abspath(sys.argv[1])
paths = [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names if name.endswith(".html")]
pages = {path: Page(path) for path in paths}
wrong = []
n_links = 0
for path, page in pages.items():
    for link in page.links:
        to = urllib.parse.urlsplit(link)
        # The page for what is not there has its links from the root of a site, wherever that is.
        if to.scheme or to.netloc or link.startswith("/") or os.path.basename(path) == "404.html":
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(path), urllib.parse.unquote(to.path))) if to.path else path
        n_links += 1
        if not os.path.exists(target) or not target.startswith(folder):
            wrong.append(f"{os.path.relpath(path, folder)}: ({link}) leads nowhere")
        elif to.fragment and target in pages and urllib.parse.unquote(to.fragment) not in pages[target].names:
            wrong.append(f"{os.path.relpath(path, folder)}: no heading of ({link})")
print(*sorted(set(wrong)), f"{len(pages)} pages, {n_links} links, {len(set(wrong))} lead nowhere", sep="\n")
sys.exit(bool(wrong) or n_links < 100)
