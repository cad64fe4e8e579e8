"""A report in a real browser, Debian's chromium without a window: `make test-browser`.

    make test-browser                                        # a page of synthetic sections
    make test-browser REPORT=runs/analysis/NAME/report.html  # and this one

Chromium is driven over a pipe by its DevTools protocol, so nothing else has to be installed.
Pictures of the pages stay in a folder, which the last line of the output names.
"""

import base64
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time

import pytest

from tests.analysis.page.test_document import synthetic

NAMES = ("chromium", "chromium-browser", "google-chrome")
SIZES = dict(phone=(390, 844), desk=(1440, 900), paper=(680, 960))  # A4 without its margins
SECONDS = 60  # maximum wait for an answer


def _above(descriptor: int) -> int:
    """Returns the same pipe under a descriptor above 10."""
    duplicate = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return duplicate


class Browser:
    """A page in a browser, and the URLs that it requested."""

    def __init__(self, folder: pathlib.Path):
        programs = [path for name in NAMES if (path := shutil.which(name))]
        if not programs:
            pytest.fail("no chromium here: apt-get install chromium", pytrace=False)
        chromium_reads, self._write = map(_above, os.pipe())
        self._read, chromium_writes = map(_above, os.pipe())
        # Chromium reads descriptor 3 and writes descriptor 4; the shell connects the pipes to them.
        options = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars"
        options += f" --remote-debugging-pipe --user-data-dir={folder / 'profile'}"
        command = f'exec "$0" {options} about:blank 3<&{chromium_reads} 4>&{chromium_writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, programs[0]],
            pass_fds=(chromium_reads, chromium_writes),
            stderr=subprocess.DEVNULL,
        )
        os.close(chromium_reads)
        os.close(chromium_writes)
        self._number, self._rest, self._session = 0, b"", None
        self.requests: list[str] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        attached = self("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Accessibility"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params) -> dict:
        """Runs a command of the protocol and returns its result."""
        self._number += 1
        message = dict(id=self._number, method=method, params=params)
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self._rest:
            received = os.read(self._read, 1 << 20)
            assert received, "chromium has ended"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(event["params"]["request"]["url"])

    def open(self, file: pathlib.Path) -> None:
        self.requests.clear()
        self("Page.navigate", url=file.as_uri())
        deadline = time.monotonic() + SECONDS
        while self.value("document.readyState + location.href") != f"complete{file.as_uri()}":
            assert time.monotonic() < deadline, f"{file} does not load"
            time.sleep(0.05)

    def value(self, expression: str):
        """Returns the value of a JavaScript expression, as JSON."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def size(self, name: str) -> None:
        width, height = SIZES[name]
        metrics = dict(width=width, height=height, deviceScaleFactor=1, mobile=name == "phone")
        self("Emulation.setDeviceMetricsOverride", **metrics)

    def media(self, kind: str = "", scheme: str = "light") -> None:
        feature = dict(name="prefers-color-scheme", value=scheme)
        self("Emulation.setEmulatedMedia", media=kind, features=[feature])

    def picture(self, file: pathlib.Path) -> None:
        """Writes a picture of the whole page to a file."""
        shot = self("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def end(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self("Browser.close")
        for pipe in (self._read, self._write):
            os.close(pipe)
        self._process.wait(SECONDS)


# -- checks of a page ------------------------------------------------------------------------------

OVERFLOWS = """(() => {
  const wrong = [], width = document.documentElement.clientWidth;
  const told = (e) => `${e.tagName} ${e.className.baseVal ?? e.className}: ${e.textContent}`;
  if (document.scrollingElement.scrollWidth > innerWidth) wrong.push("the page");
  for (const e of document.body.querySelectorAll(":not(svg *)")) {
    if (e.parentElement.closest(".scroll")) continue;
    const box = e.getBoundingClientRect();
    if (box.width && (box.left < -0.5 || box.right > width + 0.5)) wrong.push(told(e));
  }
  return wrong;
})()"""
# Texts of figures that are cut off, overlap, or are too small to read.
ILLEGIBLE = """(() => {
  const wrong = [];
  for (const svg of document.querySelectorAll("svg")) {
    const name = svg.closest("figure").querySelector("h3").textContent;
    const card = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((e) => [e, e.getBoundingClientRect()]);
    texts.forEach(([e, a], i) => {
      const size = parseFloat(getComputedStyle(e).fontSize) * svg.getScreenCTM().a;
      if (size < 8.5) wrong.push(`${name}: ${e.textContent}: ${size} px`);
      if (a.left < card.left - 1 || a.right > card.right + 1 || a.top < card.top - 1
          || a.bottom > card.bottom + 1) wrong.push(`${name}: ${e.textContent} is cut off`);
      for (const [other, b] of texts.slice(0, i)) {
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 3) {
          wrong.push(`${name}: ${other.textContent} and ${e.textContent} lie on each other`);
        }
      }
    });
  }
  return wrong;
})()"""
# Texts with a contrast below 4.5 by WCAG 2, except white texts, which are in cells of heatmaps.
FAINT = """(() => {
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const linear = parts(color).slice(0, 3).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if ((parts(color)[3] ?? 1) === 1) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const wrong = new Set();
  for (const e of document.body.querySelectorAll("*")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || ["SCRIPT", "STYLE"].includes(e.tagName)) continue;
    const style = getComputedStyle(e), drawn = e.closest("svg");
    const ink = drawn ? style.fill : style.color;
    if (drawn && ink === "rgb(255, 255, 255)") continue;
    const [low, high] = [light(ink), light(behind(e))].sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < 4.5) wrong.add(`${e.tagName} ${ink} on ${behind(e)}: ${contrast.toFixed(2)}`);
  }
  return [...wrong];
})()"""
COLUMN = """[...document.querySelectorAll("table")[%d].tBodies[0].rows].map(
  (row) => row.cells[%d].textContent)"""
SORTED = 'document.querySelectorAll("table")[%d].tHead.rows[0].cells[%d].getAttribute("aria-sort")'


@pytest.fixture(scope="module")
def folder():
    path = pathlib.Path(tempfile.mkdtemp(prefix="kvjax-report-"))
    yield path
    print(f"\npictures: {path}")


@pytest.fixture(scope="module")
def browser(folder):
    started = Browser(folder)
    yield started
    started.end()
    shutil.rmtree(folder / "profile", ignore_errors=True)


@pytest.fixture(scope="module", params=["synthetic", "given"])
def report(request, folder):
    """Returns the file of a page."""
    if request.param == "given":
        given = os.environ.get("REPORT")
        if not given:
            pytest.skip("no REPORT=FILE is given")
        return pathlib.Path(given).resolve()
    file = folder / "synthetic.html"
    file.write_text(synthetic(), "utf-8")
    return file


@pytest.fixture
def shown(browser, report):
    """Returns the browser with the page, in desktop size and light mode."""
    browser.size("desk")
    browser.media()
    browser.open(report)
    return browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["phone", "desk"])
def test_it_is_legible(shown, report, folder, size, scheme):
    """Nothing overflows, is cut off, overlaps or is faint."""
    shown.size(size)
    shown.media(scheme=scheme)
    shown.picture(folder / f"{report.stem}-{size}-{scheme}.png")
    assert shown.value(OVERFLOWS) == []
    assert shown.value(ILLEGIBLE) == []
    assert shown.value(FAINT) == []
    assert shown.value("[...document.scripts].every((e) => !e.getClientRects().length)")
    paper = shown.value("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")


def test_only_the_page_is_requested(shown, report):
    urls = [url for url in shown.requests if not url.startswith("data:")]
    assert urls == [report.as_uri()]
    assert shown.value('performance.getEntriesByType("resource").map((e) => e.name)') == []


def test_figures_have_words(shown):
    nodes = shown("Accessibility.getFullAXTree")["nodes"]
    images = [node for node in nodes if node.get("role", {}).get("value") == "image"]
    assert len(images) == shown.value('document.querySelectorAll("svg").length') > 0
    assert all(len(image["name"]["value"]) > 10 for image in images)


def test_wide_tables_scroll_by_keys(shown):
    shown.size("phone")
    boxes = '[...document.querySelectorAll(".scroll")]'
    wide = f"{boxes}.find((box) => box.scrollWidth > box.clientWidth)"
    if shown.value(f"{wide} === undefined"):
        pytest.skip("no table is wider than a phone")
    shown.value(f"{wide}.focus()")
    assert shown.value("document.activeElement.className") == "scroll"
    _press(shown, "ArrowRight")
    ended = time.monotonic() + SECONDS
    while shown.value("document.activeElement.scrollLeft") == 0:
        assert time.monotonic() < ended
        time.sleep(0.05)
    nodes = shown("Accessibility.getFullAXTree")["nodes"]
    regions = [node for node in nodes if node.get("role", {}).get("value") == "region"]
    assert all(node["name"]["value"] for node in regions)


def test_tables_sort(shown):
    """Sorts numbers and words in both directions, with the mouse and with Enter."""
    for table in range(shown.value('document.querySelectorAll("table").length')):
        row = f'document.querySelectorAll("table")[{table}].tHead.rows[0]'
        for column in range(shown.value(f"{row}.cells.length")):

            def of(text, at=(table, column)):
                return shown.value(text % at)

            before = of(COLUMN)
            shown.value(f'{row}.cells[{column}].querySelector("button").click()')
            assert of(SORTED) == "ascending"
            up = of(COLUMN)
            shown.value(f'{row}.cells[{column}].querySelector("button").focus()')
            _press(shown, "Enter")
            assert of(SORTED) == "descending"
            down = of(COLUMN)
            assert sorted(up) == sorted(down) == sorted(before)
            assert _numbers(up) == sorted(_numbers(before))
            assert _numbers(down) == sorted(_numbers(before), reverse=True)
            there = [cell for cell in up if cell != "–"]
            assert up == there + ["–"] * (len(up) - len(there))
            assert down[len(there) :] == up[len(there) :]
            if len(set(there)) > 1:
                assert up != down


def _numbers(cells: list[str]) -> list[float]:
    """Returns the numbers of a column; [] for a column of text."""
    try:
        return [float(cell.replace(",", "").rstrip(" %")) for cell in cells if cell != "–"]
    except ValueError:
        return []


def _press(browser: Browser, key: str) -> None:
    codes = dict(Enter=13, ArrowRight=39)
    event = dict(key=key, code=key, windowsVirtualKeyCode=codes[key])
    event |= dict(text="\r") if key == "Enter" else {}
    browser("Input.dispatchKeyEvent", type="keyDown", **event)
    browser("Input.dispatchKeyEvent", type="keyUp", **event)


def test_curves_can_be_hidden_and_read(shown):
    """With the mouse, the legend's buttons, which hide a curve in all figures, and arrow keys."""
    if shown.value('document.querySelector("script.curves") === null'):
        pytest.skip("no curves here")
    figure = '[...document.querySelectorAll("figure:has(script.curves)")].at(-1)'  # not of points
    curves = json.loads(shown.value(f'{figure}.querySelector("script.curves").textContent'))
    output = f'{figure}.querySelector("output").textContent'
    buttons = '[...document.querySelectorAll(".legend button")]'
    names = shown.value(f"{buttons}.map((b) => b.textContent)")
    assert {curve["name"] for curve in curves} <= set(names)
    chosen = f"{buttons}[{names.index(curves[0]['name'])}]"
    shown.value(f"{figure}.scrollIntoView({{behavior: 'instant'}})")
    right, down, *_ = curves[0]["points"][-1]
    place = f"new DOMPoint({right}, {down}).matrixTransform({figure}.querySelector('svg')"
    at = shown.value(f"(({{x, y}}) => [x, y])({place}.getScreenCTM()))")

    def move(x, y):
        return shown("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    move(*at)
    assert shown.value(output).startswith(f"{curves[0]['name']}: ")
    assert shown.value(f'{figure}.querySelectorAll("circle.dot").length') == 1
    move(1, 1)
    assert shown.value(output) == ""
    line = f"{figure}.querySelector('[data-series=\"0\"]').getBoundingClientRect().width"
    assert shown.value(line) > 0
    shown.value(f"{chosen}.click()")
    assert shown.value(f"{chosen}.getAttribute('aria-pressed')") == "false"
    assert shown.value(line) == 0
    everywhere = f"""[...document.querySelectorAll("script.curves")].every((script) => {{
      const names = JSON.parse(script.textContent).map((curve) => curve.name);
      const i = names.indexOf({json.dumps(curves[0]["name"])}), figure = script.parentElement;
      return i < 0 || figure.querySelector(`[data-series="${{i}}"]`).style.display === "none";
    }})"""
    assert shown.value(everywhere)
    move(*at)
    assert not shown.value(output).startswith(f"{curves[0]['name']}: ")
    shown.value(f"{chosen}.click()")
    shown.value(f"{figure}.querySelector('.card').focus()")
    move(1, 1)
    _press(shown, "ArrowRight")
    first = f"{curves[0]['name']}: {curves[0]['points'][0][2]:.6g}"
    assert shown.value(output).replace(",", "").startswith(first)
    _press(shown, "ArrowRight")
    assert not shown.value(output).replace(",", "").startswith(first + " ")


def test_tables_that_stack_fit_a_phone(shown):
    shown.size("phone")
    wide = """[...document.querySelectorAll(".scroll:has(.stacks)")].map(
      (box) => box.scrollWidth > box.clientWidth)"""
    assert not any(shown.value(wide))


def test_it_reads_without_scripts(shown, report):
    shown("Emulation.setScriptExecutionDisabled", value=True)
    try:
        shown.open(report)
        assert shown.value('document.querySelectorAll("thead button").length') == 0
        assert shown.value('[...document.querySelectorAll("th")].every((e) => e.textContent)')
        assert shown.value(OVERFLOWS) == []
    finally:
        shown("Emulation.setScriptExecutionDisabled", value=False)


def test_it_prints(shown, report, folder):
    """Prints in black on white, without navigation, figures on one page."""
    pdf = base64.b64decode(shown("Page.printToPDF", preferCSSPageSize=True)["data"])
    (folder / f"{report.stem}.pdf").write_bytes(pdf)
    assert pdf.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 1
    shown.media("print", scheme="dark")
    assert shown.value('getComputedStyle(document.querySelector("nav")).display') == "none"
    assert shown.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert shown.value("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    figure = 'getComputedStyle(document.querySelector(".figures figure"))'
    assert shown.value(f"{figure}.breakInside") == "avoid"
    shown.size("paper")
    right = 'document.querySelectorAll("table")].map((e) => e.getBoundingClientRect().right'
    assert max(shown.value(f"[...{right})")) <= SIZES["paper"][0]
