"""The report in a real browser: drawn, silent, readable with keys and on a phone, and never losing a recovered cell."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml

from gnmr_megatron.analysis.report import write_report
from gnmr_megatron.control.config import ControlConfig
from gnmr_megatron.observability.risk_matrix import read_risk_matrix
from tools.record_synthetic_run import record

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LAPTOP = {"viewport": {"width": 1366, "height": 850}, "color_scheme": "light"}
DARK = {**LAPTOP, "color_scheme": "dark"}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
BUSY = ControlConfig(alpha=1.8, beta=1.5, delta=4, max_recovered=2, lock_steps=3, warmup_steps=10)
STEPS, LAYERS = 4000, 10  # 40 units: more cells than are listed, more steps than pixels

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"there is no {CHROMIUM}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "busy <script>alert(1)<"
    record(folder, num_layers=LAYERS, steps=STEPS, config=BUSY, seed=3, shocks=1e-3)
    config = {"name": "busy", "gnmr": dataclasses.asdict(BUSY)}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(scope="module")
def page_of_one(folder, tmp_path_factory):
    return write_report([folder], tmp_path_factory.mktemp("page") / "one.html")


@pytest.fixture(scope="module")
def page_of_three(tmp_path_factory):
    """A page of small runs: with few steps, with a map, and without a matrix."""
    place = tmp_path_factory.mktemp("three")
    record(place / "first", num_layers=1, steps=1, config=BUSY)
    record(place / "second", num_layers=1, steps=60, config=BUSY)
    record(place / "bare", num_layers=1, steps=200, config=BUSY, shocks=0.05)
    for name in ("risk_matrix.bin", "units.json"):
        (place / "bare" / name).unlink()
    return write_report([place / "first", place / "second", place / "bare"], place / "three.html")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


class Opened:
    """A page, and what it should not have done: said something to the console, asked for anything but its file."""

    def __init__(self, browser, path, options):
        self.troubles = []
        self.page = browser.new_context(**options).new_page()
        self.page.on("console", lambda message: self.troubles.append(message.text))
        self.page.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.page.on("dialog", lambda dialog: self.troubles.append(dialog.message))
        self.page.on("request", lambda request: self._check(request.url, path.as_uri()))
        session = self.page.context.new_cdp_session(self.page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-state=drawn]", state="attached", timeout=120_000)
        metrics = session.send("Performance.getMetrics")["metrics"]
        self.seconds = {metric["name"]: metric["value"] for metric in metrics}["TaskDuration"]

    def _check(self, url, own):
        if url != own:
            self.troubles.append(url[:200])


@pytest.fixture(scope="module")
def opened(browser, page_of_one, page_of_three):
    """Each page, opened once."""
    return {
        "laptop": Opened(browser, page_of_one, LAPTOP),
        "dark": Opened(browser, page_of_one, DARK),
        "phone": Opened(browser, page_of_one, PHONE),
        "three": Opened(browser, page_of_three, LAPTOP),
    }


@pytest.fixture(autouse=True)
def _silent(opened):
    """No test leaves a page that has complained."""
    yield
    assert {name: each.troubles for name, each in opened.items() if each.troubles} == {}


@pytest.fixture
def laptop(opened):
    page = opened["laptop"].page
    page.evaluate("View.move('all'); Report.grids.get(0).heatMap.reset(); scrollTo(0, 0)")
    return page


def colours(page, selector):
    """Number of different colours on a canvas."""
    return page.evaluate(
        """selector => {
            const canvas = document.querySelector(selector);
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(new Uint32Array(data.buffer)).size;
        }""",
        selector,
    )


def scroll_through(page):
    """Line plots are drawn as they come into sight."""
    for plot in page.locator(".line-plot").all():
        if plot.is_visible():
            plot.scroll_into_view_if_needed()
            plot.locator("path.js-line").first.wait_for(state="attached", timeout=60_000)


def place_of(page, unit, step):
    """Where a cell of the map is drawn, from the top left of its canvas."""
    return page.evaluate(
        """([unit, step]) => {
            const grid = Report.grids.get(0).heatMap;
            const row = grid.painter.rows.indexOf(unit);
            return [grid.x(step + 0.5), grid.y(row + 0.5)];
        }""",
        [unit, step],
    )


def test_everything_is_drawn_and_nothing_is_asked_of_a_network(laptop):
    page = laptop
    scroll_through(page)
    drawn = page.locator(".line-plot").count()
    assert drawn == 7
    assert page.locator(".line-plot path.js-line").count() >= drawn
    assert colours(page, "#run-0-heat-map canvas.map") > 20
    assert colours(page, "#run-0-timeline canvas.map") > 3
    title = page.locator("h1").inner_text()
    assert title == "busy <script>alert(1)<"


def test_hovering_over_a_recovered_cell_tells_its_unit_and_its_values(laptop, folder):
    matrix = read_risk_matrix(folder)
    row, unit = next(zip(*np.nonzero(matrix.recovered), strict=True))
    step = int(matrix.steps[row])
    laptop.evaluate("([first, last]) => View.set(first, last)", [step - 3, step + 3])
    canvas = laptop.locator("#run-0-heat-map canvas.map")
    canvas.scroll_into_view_if_needed()
    x, y = place_of(laptop, int(unit), step)
    canvas.hover(position={"x": x, "y": y})
    tip = laptop.locator("#run-0-heat-map .tip").inner_text()
    for part in (
        matrix.units[unit],
        f"step {step:,}",
        f"GNMR {float(f'{matrix.gnmr[row, unit]:.4g}'):g}",
        f"delta-GNMR {float(f'{matrix.delta_gnmr[row, unit]:.4g}'):g}",
        f"norm {float(f'{matrix.norms[row, unit]:.4g}'):g}",
        "recovered: ",
    ):
        assert part in tip


def test_hovering_over_any_other_cell_tells_its_gnmr_to_within_a_few_percent(laptop, folder):
    matrix = read_risk_matrix(folder)
    quiet = ~(matrix.recovered | matrix.selected)
    row, unit = 1234, int(np.flatnonzero(quiet[1234])[7])
    step = int(matrix.steps[row])
    laptop.evaluate("step => View.set(step, step)", step)
    canvas = laptop.locator("#run-0-heat-map canvas.map")
    canvas.scroll_into_view_if_needed()
    x, y = place_of(laptop, unit, step)
    canvas.hover(position={"x": x, "y": y})
    tip = laptop.locator("#run-0-heat-map .tip").inner_text()
    assert f"{matrix.units[unit]}\nstep {step:,}\nGNMR " in tip
    told, bound = tip.split("GNMR ")[1].split(" %")[0].split(" (± ")
    error = abs(float(told) / matrix.gnmr[row, unit] - 1)
    assert error <= 1.2 * float(bound) / 100 + 0.005
    assert float(bound) <= 5


def test_no_zoom_loses_a_recovered_cell_or_a_maximum(laptop, folder):
    """Each recovered step lies in a box of its row, at least two pixels wide; each column shows its highest GNMR."""
    matrix = read_risk_matrix(folder)
    draw = np.random.default_rng(0)
    starts = draw.integers(1, STEPS, 30)
    views = [(1, STEPS), *((int(s), min(int(s + draw.integers(1, STEPS)), STEPS)) for s in starts)]
    resolution = laptop.evaluate("META.runs[0].grid.resolution")
    seen = laptop.evaluate(
        """(views) => views.map(([first, last]) => {
            [View.first, View.last] = [first, last];
            const grid = Report.grids.get(0).heatMap;
            grid.measure();
            const boxes = grid.painter.boxes(grid).map(({ from, to, row }) => [from, to, row]);
            const steps = grid.steps(Math.floor(grid.columns / 3));
            const codes = grid.painter.rows.map((unit) => grid.painter.code(unit, ...steps));
            return [[boxes, grid.left, grid.plotWidth], [steps, codes]];
        })""",
        views,
    )
    for (first, last), (boxes, maxima) in zip(views, seen, strict=True):
        spans, left, width = boxes
        covered = np.zeros((len(matrix.units), last - first + 1), dtype=bool)
        for start, end, row in spans:
            steps = (np.array([start, end]) - left) / width * (last - first + 1)
            covered[row, max(round(steps[0]), 0) : round(steps[1])] = True
        recovered = matrix.recovered[first - 1 : last].T
        assert (covered | ~recovered).all()
        (begin, end), codes = maxima
        wanted = matrix.gnmr[begin - 1 : end].max(0)
        np.testing.assert_allclose(
            np.exp(np.array(codes) * resolution), wanted, rtol=0.52 * resolution
        )


def test_a_drag_zooms_all_plots_and_a_double_click_takes_it_back(laptop):
    page = laptop
    canvas = page.locator("#run-0-heat-map canvas.map")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 500, box["y"] + 160, steps=4)
    page.mouse.up()
    first, last = int(page.input_value("#from")), int(page.input_value("#to"))
    assert 1 < first < last < STEPS
    ranges = page.evaluate("document.querySelector('#loss .line-plot')._fullLayout.xaxis.range")
    assert ranges == [first - 0.5, last + 0.5]
    assert (
        page.evaluate("Report.grids.get(0).heatMap.bottom - Report.grids.get(0).heatMap.top") < 40
    )
    canvas.dblclick(position={"x": 300, "y": 60})
    assert (page.input_value("#from"), page.input_value("#to")) == ("1", str(STEPS))


def test_all_controls_are_reached_and_work_with_keys(opened):
    page = opened["dark"].page  # which no pointer has touched
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(() => { const e = document.activeElement;"
                " return e.id || e.dataset.move || e.className || e.tagName.toLowerCase(); })()"
            )
        )
        if reached[-1] == "map":
            break
    assert reached[:3] == ["skip", "theme", "from"]
    for control in ("to", "in", "out", "left", "right", "all", "rows", "summary", "map"):
        assert control in reached
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    told = page.locator("#run-0-heat-map .told")
    assert told.inner_text().startswith("decoder.layers.0.self_attention.linear_proj; steps ")
    for _ in range(8):
        page.keyboard.press("+")
    assert page.input_value("#from") == page.input_value("#to")  # down to one step
    assert "; step " in told.inner_text()
    page.keyboard.press("0")
    assert page.input_value("#to") == str(STEPS)


def test_a_phone_scrolls_only_up_and_down(opened):
    page = opened["phone"].page
    scroll_through(page)
    for details in page.locator("details").all():
        details.evaluate("each => (each.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    canvas = page.locator("#run-0-heat-map canvas.map")
    canvas.scroll_into_view_if_needed()
    canvas.tap(position={"x": 200, "y": 100})
    assert "decoder.layers." in page.locator("#run-0-heat-map .tip").inner_text()


def test_dark_and_light_follow_the_system_and_the_button(laptop, opened):
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = laptop, opened["dark"].page
    paper = light.evaluate(background)
    night = dark.evaluate(background)
    assert paper != night
    line = "document.querySelector('#loss .line-plot').data.find(({ name }) => name === 'training').line.color"
    before = light.evaluate(line)
    light.click("#theme")
    assert light.evaluate(background) == night
    assert light.evaluate(line) == dark.evaluate(line) != before
    light.click("#theme")
    assert light.evaluate(background) == paper


@pytest.mark.parametrize("theme", ["laptop", "dark"])
def test_text_stands_out_from_its_background(opened, theme):
    """At least 4.5 to 1, as WCAG AA asks for."""
    worst = opened[theme].page.evaluate(CONTRAST)
    assert worst["ratio"] >= 4.5, worst


CONTRAST = """(() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const known = new Map();
    const rgb = (color) => {
        if (!known.has(color)) {
            canvas.clearRect(0, 0, 1, 1);
            canvas.fillStyle = color;
            canvas.fillRect(0, 0, 1, 1);
            known.set(color, [...canvas.getImageData(0, 0, 1, 1).data]);
        }
        return known.get(color);
    };
    const light = (color) => {
        const parts = rgb(color).slice(0, 3).map((v) => v / 255);
        const linear = parts.map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    };
    let worst = { ratio: 99 };
    for (const element of document.querySelectorAll("body *")) {
        const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
        if (!hasText || element.closest("script, style, svg, .unseen") || !element.checkVisibility()) continue;
        let at = element;
        while (rgb(getComputedStyle(at).backgroundColor)[3] < 255 && at.parentElement) at = at.parentElement;
        const [a, b] = [getComputedStyle(element).color, getComputedStyle(at).backgroundColor].map(light);
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < worst.ratio) worst = { ratio, text: element.textContent.trim().slice(0, 60) };
    }
    return worst;
})()"""


def test_runs_share_the_training_plots_and_each_has_its_own_map(opened):
    page = opened["three"].page
    page.locator("#loss").scroll_into_view_if_needed()
    page.locator("#loss path.js-line").first.wait_for(state="attached")
    names = page.evaluate("document.querySelector('#loss .line-plot').data.map(({ name }) => name)")
    assert {"second, training", "bare, training"} <= set(names)
    page.select_option("#run-choice", "1")
    page.wait_for_selector("#run-1-heat-map .legend .scale")
    assert colours(page, "#run-1-heat-map canvas.map") > 20
    assert page.locator("#run-0-heat-map").is_hidden()


def test_a_run_without_a_map_is_drawn_all_the_same(opened):
    page = opened["three"].page
    page.select_option("#run-choice", "2")
    page.wait_for_selector("#run-2-timeline .legend span")
    assert page.locator("#run-2-heat-map").count() == 0
    assert colours(page, "#run-2-timeline canvas.map") > 3


def test_opening_is_quick_and_the_file_small(opened, page_of_one):
    """Processor time of the page's own thread, which other work on the machine changes least."""
    assert page_of_one.stat().st_size < 3_000_000
    assert opened["laptop"].seconds < 3
