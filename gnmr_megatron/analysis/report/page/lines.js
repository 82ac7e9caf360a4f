"use strict";
// Line plots, drawn by Plotly from as many points as there are pixels.

const Lines = {
  plots: [],
  format: new Intl.NumberFormat("en", { maximumSignificantDigits: 5 }),
  whole: new Intl.NumberFormat("en"),
  dashes: ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"],

  /** Plotly reads a little HTML in its texts; names of runs are none. */
  escape(text) {
    return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  },

  /** First index whose step is at least `step`. */
  indexOf(steps, step) {
    let low = 0;
    let high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  },

  /** Lowest, mean and highest finite value of each bucket of steps in view. */
  reduce(steps, values, most) {
    const from = Lines.indexOf(steps, View.first);
    const to = Lines.indexOf(steps, View.last + 1);
    const size = Math.max(Math.ceil((to - from) / most), 1);
    const out = { x: [], mean: [], low: [], high: [], text: [], isBand: size > 1 };
    for (let start = from; start < to; start += size) {
      const end = Math.min(start + size, to);
      let [sum, count, low, high] = [0, 0, Infinity, -Infinity];
      for (let i = start; i < end; i++) {
        const value = values[i];
        if (typeof value === "number") {
          sum += value;
          count++;
          low = Math.min(low, value);
          high = Math.max(high, value);
        }
      }
      out.x.push((steps[start] + steps[end - 1]) / 2);
      out.mean.push(count ? sum / count : null);
      out.low.push(count ? low : null);
      out.high.push(count ? high : null);
      out.text.push(Lines.told(steps[start], steps[end - 1], count ? [sum / count, low, high] : null));
    }
    return out;
  },

  told(first, last, values) {
    if (first === last) {
      return `step ${Lines.whole.format(first)}: <b>${values ? Lines.number(values[0]) : "not finite"}</b>`;
    }
    const where = `steps ${Lines.whole.format(first)}–${Lines.whole.format(last)}`;
    if (!values) {
      return `${where}: <b>not finite</b>`;
    }
    const [mean, low, high] = values.map(Lines.number);
    return `${where}: mean <b>${mean}</b> (${low} to ${high})`;
  },

  number(value) {
    return Lines.format.format(value);
  },

  /**
   * Adds a plot.
   *
   * @param {string} id of its figure.
   * @param {object} options `log`; `zero`: the axis begins at 0; `format` of its numbers; `level`: a dashed line; `series`: a function that
   *   gives {name, steps, values, color, dash, band, fill, points} for each line, once the colours are known.
   */
  add(id, options) {
    const figure = document.getElementById(id);
    if (!figure) {
      return;
    }
    const plot = { element: figure.querySelector(".line-plot"), isDrawn: false, ...options };
    Lines.plots.push(plot);
    Lines.watcher.observe(plot.element);
  },

  start() {
    Lines.watcher = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) {
          const plot = Lines.plots.find((each) => each.element === entry.target);
          if (entry.isIntersecting && !plot.isDrawn) {
            Lines.draw(plot);
          }
        }
      },
      { rootMargin: "100px" },
    );
    addEventListener("beforeprint", () => {
      for (const plot of Lines.plots.filter(({ element }) => element.clientWidth)) {
        Lines.draw(plot); // also those that were never in sight
      }
    });
    View.listeners.push(Lines.drawAgain);
    Theme.listeners.push(Lines.drawAgain);
  },

  drawAgain() {
    for (const plot of Lines.plots) {
      if (plot.isDrawn) {
        Lines.draw(plot);
      }
    }
  },

  traces(plot, width) {
    const found = [];
    for (const line of plot.series()) {
      if (line.points) {
        found.push(Lines.points(line));
        continue;
      }
      const reduced = Lines.reduce(line.steps, line.values, line.band ? width : width / 4);
      if (line.band && reduced.isBand) {
        found.push(...Lines.band(line, reduced));
      }
      found.push({
        x: reduced.x,
        y: reduced.mean,
        text: reduced.text,
        name: Lines.escape(line.name),
        hovertemplate: `${Lines.escape(line.name)}, %{text}<extra></extra>`,
        mode: reduced.x.length === 1 ? "markers" : "lines",
        line: { color: line.color, width: 1.8, dash: line.dash || "solid", shape: line.shape || "linear" },
        fill: line.fill ? "tozeroy" : "none",
        fillcolor: Lines.faint(line.color, 0.22),
      });
    }
    return found;
  },

  points(line) {
    const inView = line.steps.map((step) => step >= View.first && step <= View.last);
    const x = line.steps.filter((_, i) => inView[i]);
    return {
      x,
      y: line.values.filter((_, i) => inView[i]),
      name: Lines.escape(line.name),
      hovertemplate: `${Lines.escape(line.name)}, step %{x:,}: <b>%{y:.5~g}</b><extra></extra>`,
      mode: line.points === "circle" && x.length > 1 ? "lines+markers" : "markers",
      line: { color: line.color, width: 1, dash: "dot" },
      marker: {
        color: line.color,
        symbol: line.points,
        size: line.points === "circle" ? 7 : 10,
        line: { color: Theme.color("card"), width: 1.5 },
      },
    };
  },

  band(line, reduced) {
    const edge = { x: reduced.x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    return [
      { ...edge, y: reduced.low },
      { ...edge, y: reduced.high, fill: "tonexty", fillcolor: Lines.faint(line.color, 0.25) },
    ];
  },

  faint(color, share) {
    return color.replace("rgb(", "rgba(").replace(")", `, ${share})`);
  },

  draw(plot) {
    const { element } = plot;
    const width = Math.max(Math.round(element.clientWidth - 70), 60);
    const isTouch = matchMedia("(pointer: coarse)").matches;
    const axis = {
      gridcolor: Theme.color("grid"),
      linecolor: Theme.color("line"),
      zeroline: false,
      color: Theme.color("quiet"),
      automargin: true,
    };
    const data = Lines.traces(plot, width);
    const layout = {
      margin: { l: 48, r: 10, t: data.length > 1 ? 28 : 8, b: 34 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: Theme.color("ink") },
      showlegend: data.filter((trace) => trace.showlegend !== false).length > 1,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12 } },
      hovermode: "closest",
      hoverdistance: 40,
      hoverlabel: { bgcolor: Theme.color("card"), bordercolor: Theme.color("line"), font: { color: Theme.color("ink") } },
      dragmode: isTouch ? false : "zoom",
      xaxis: { ...axis, range: [View.first - 0.5, View.last + 0.5], tickformat: ",~d", fixedrange: isTouch },
      yaxis: {
        ...axis,
        type: plot.log ? "log" : "linear",
        ...(plot.log ? Lines.logTicks(data) : {}),
        tickformat: plot.format,
        rangemode: plot.zero ? "tozero" : "normal",
        fixedrange: true,
        nticks: 6,
        exponentformat: "power",
      },
      shapes: plot.level === undefined ? [] : [Lines.level(plot.level)],
    };
    const config = { displayModeBar: false, responsive: true, doubleClick: false };
    Plotly.react(element, data, layout, config);
    if (!plot.isDrawn) {
      plot.isDrawn = true;
      element.on("plotly_relayout", (change) => Lines.follow(change));
      element.on("plotly_doubleclick", () => View.move("all"));
    }
  },

  /** 1, 2 and 5 times the powers of ten, or the powers alone where there are many. */
  logTicks(data) {
    const values = data.flatMap(({ y }) => y).filter((value) => value > 0);
    const range = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, 0]);
    const [low, high] = range.map(Math.log10);
    const factors = high - low < 3 ? [1, 2, 5] : [1];
    const powers = Array.from({ length: Math.max(Math.ceil(high) - Math.floor(low) + 1, 0) || 0 }, (_, i) => Math.floor(low) + i);
    const tickvals = powers.flatMap((power) => factors.map((factor) => factor * 10 ** power));
    return { tickvals, ticktext: tickvals.map((value) => String(Number(value.toPrecision(1)))) };
  },

  level(y) {
    const line = { color: Theme.color("warning"), width: 1.5, dash: "dash" };
    return { type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line, layer: "above" };
  },

  /** A box drawn in one plot is the range of all. */
  follow(change) {
    const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (range.every((value) => typeof value === "number")) {
      View.set(Math.ceil(range[0]), Math.floor(range[1]));
    }
  },
};
