"use strict";
// Starts the page: texts are there already; plots follow as their data is unpacked.

const META = JSON.parse(document.getElementById("meta").textContent);

const Report = {
  series: [],
  grids: new Map(), // of the runs that were shown

  name(run, text) {
    return META.runs.length > 1 ? `${META.runs[run].name}, ${text}` : text;
  },

  color(run) {
    return Theme.color(`series-${(run % 6) + 1}`);
  },

  /** One line a run, of a column of its series. */
  overlaid(column, text) {
    return Report.series.map((data, run) => ({
      name: Report.name(run, text),
      steps: data.step,
      values: data[column],
      color: Report.color(run),
      dash: Lines.dashes[Math.floor(run / 6) % 6],
      band: true,
    }));
  },

  training() {
    Lines.add("loss", {
      series: () => [
        ...Report.overlaid("loss", "training"),
        ...Report.series.flatMap(({ evaluations, spikes }, run) => [
          ...Report.points(run, evaluations, "held-out", "circle"),
          ...Report.points(run, spikes, "spike", "triangle-down"),
        ]),
      ],
    });
    Lines.add("grad-norm", { log: true, series: () => Report.overlaid("grad_norm", "gradient norm") });
    Lines.add("throughput", { zero: true, format: "~s", series: () => Report.overlaid("tokens_per_second", "tokens a second") });
  },

  points(run, { step, loss }, text, symbol) {
    const color = symbol === "circle" && META.runs.length === 1 ? Theme.color("series-2") : Report.color(run);
    const shown = symbol === "circle" ? color : Theme.color("warning");
    return step.length
      ? [{ name: Report.name(run, text), steps: step, values: loss, color: shown, points: symbol }]
      : [];
  },

  control(run) {
    const data = Report.series[run];
    const line = (column, name, color, more = {}) => ({
      name,
      steps: data.step,
      values: data[column],
      color: Theme.color(color),
      ...more,
    });
    Lines.add(`run-${run}-budget`, {
      zero: true,
      series: () => [
        line("recovered", "recovered", "series-1", { fill: true, shape: "hv" }),
        line("locked", "locked", "series-3", { dash: "dot" }),
        line("max_recovered", "budget", "series-2", { dash: "dash" }),
      ],
    });
    Lines.add(`run-${run}-exceedance`, {
      zero: true,
      level: META.paper_percent,
      series: () => [line("exceedance_percent", "over a threshold, percent", "series-1")],
    });
    Lines.add(`run-${run}-switches`, {
      zero: true,
      series: () => [line("switches_per_1000", "switches per 1,000 steps", "series-1")],
    });
    Lines.add(`run-${run}-cost`, {
      zero: true,
      series: () => [line("control_percent", "control, percent", "series-1")],
    });
  },

  async maps(run) {
    const meta = META.runs[run];
    const cells = new Cells(meta, await Unpack.json(`run-${run}-cells`));
    performance.mark("cells");
    if (meta.grid) {
      const figure = document.getElementById(`run-${run}-heat-map`);
      const painter = new HeatMap(meta, await Unpack.bytes(`run-${run}-grid`), cells);
      performance.mark("grid");
      const grid = new Grid(figure, painter, meta.short);
      Report.grids.get(run).heatMap = grid;
      figure.querySelector(".rows").addEventListener("change", (event) => {
        grid.showRows(Report.rows(meta, cells, event.target.value));
      });
    }
    if (meta.has_spans) {
      const figure = document.getElementById(`run-${run}-timeline`);
      Report.grids.get(run).timeline = new Grid(figure, new Timeline(meta, cells), meta.short);
    }
  },

  rows(meta, cells, choice) {
    const [kind, value] = choice.split(/:(.*)/s);
    const all = [...Array(meta.grid.num_units).keys()];
    const kinds = {
      all: () => all,
      marked: () => cells.units(),
      operator: () => all.filter((unit) => meta.units[unit].split(".").at(-1) === value),
      layer: () => all.filter((unit) => meta.units[unit].split(".")[2] === value),
    };
    return kinds[kind]();
  },

  /** Shows one run; its maps are made when it is first shown. */
  async choose(run) {
    for (const part of document.querySelectorAll("article[data-run]")) {
      part.hidden = Number(part.dataset.run) !== run;
    }
    if (!Report.grids.has(run)) {
      Report.grids.set(run, {});
      await Report.maps(run);
    }
  },

  async start() {
    Theme.start();
    View.start(Math.min(...META.runs.map((run) => run.first)), Math.max(...META.runs.map((run) => run.last), 1));
    const choice = document.getElementById("run-choice");
    choice?.addEventListener("change", () => Report.choose(Number(choice.value)));
    const [, ...series] = await Promise.all([
      Unpack.script("plotly"),
      ...META.runs.map((_, run) => Unpack.json(`run-${run}-series`)),
    ]);
    performance.mark("unpacked");
    Report.series = series;
    Lines.start();
    Report.training();
    META.runs.forEach((_, run) => Report.control(run));
    await Report.choose(0);
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve))); // plots in sight
    performance.mark("drawn");
    document.documentElement.dataset.state = "drawn";
  },
};

Report.start();
