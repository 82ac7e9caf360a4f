"use strict";
// Recovered spans by reason, and what is known of single cells.

class Cells {
  /** @param {object} content of the block `cells`. */
  constructor(run, content) {
    this.run = run;
    this.spans = content.spans;
    this.selections = content.selections;
    this.listed = content.listed;
    this.starts = Cells.starts(this.spans.unit, run.units.length);
  }

  /** For units in ascending order, where each one's items begin. */
  static starts(units, count) {
    const starts = new Int32Array(count + 1);
    for (const unit of units) {
      starts[unit + 1]++;
    }
    for (let unit = 0; unit < count; unit++) {
      starts[unit + 1] += starts[unit];
    }
    return starts;
  }

  /** Spans of a unit that reach into a range of steps, in order. */
  *spansOf(unit, first, last) {
    const { spans } = this;
    let [low, high] = [this.starts[unit], this.starts[unit + 1]];
    const end = high;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans.last[middle] < first) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    for (let i = low; i < end && spans.first[i] <= last; i++) {
      yield { first: spans.first[i], last: spans.last[i], reason: spans.reason[i] };
    }
  }

  units() {
    return [...new Set(this.spans.unit)];
  }

  /** Index of an item by unit and step, built when it is first asked for. */
  static find(items, unit, step) {
    if (!items) {
      return undefined;
    }
    items.index ||= new Map(items.unit.map((each, i) => [each * 2 ** 32 + items.step[i], i]));
    return items.index.get(unit * 2 ** 32 + step);
  }

  /** Norm and ratios of a cell: exact where it is listed, else the GNMR that is given. */
  values(unit, step, approximate) {
    const { listed } = this;
    const i = Cells.find(listed, unit, step);
    if (i === undefined) {
      return [`GNMR ${approximate}`];
    }
    return [`GNMR ${listed.gnmr[i]}`, `delta-GNMR ${listed.delta_gnmr[i]}`, `norm ${listed.norm[i]}`];
  }

  /** Whether a unit was recovered in steps, why, and whether it was selected after them. */
  recovery(unit, first, last) {
    const word = this.run.mode === "monitor" ? "selected, not switched" : "recovered";
    const spans = [...this.spansOf(unit, first, last)];
    if (first < last) {
      const steps = spans.reduce((sum, s) => sum + Math.min(s.last, last) - Math.max(s.first, first) + 1, 0);
      return spans.length ? [`${word} in ${steps} of ${last - first + 1} steps`] : [];
    }
    const lines = spans.map((span) => `${word}: ${META.reasons[span.reason]}`);
    const i = Cells.find(this.selections, unit, first);
    if (i !== undefined) {
      const { score, lock } = this.selections;
      lines.push(`selected for the next step: score ${score[i]}, lock ${lock[i]}`);
    }
    return lines;
  }
}

class Timeline {
  constructor(run, cells) {
    Object.assign(this, { run, cells });
    this.rows = cells.units();
  }

  static color(reason) {
    const name = META.reasons[reason];
    const known = { GNMR: "gnmr", "delta-GNMR": "delta-gnmr", lock: "lock" };
    return Theme.color(`reason-${known[name] || "other"}`);
  }

  paint(grid, context) {
    const line = Theme.color("grid");
    for (let row = grid.top; row < grid.bottom; row++) {
      context.fillStyle = line;
      context.fillRect(grid.left, grid.y(row + 1) - 1, grid.plotWidth, grid.rowHeight > 5 ? 1 : 0);
      const spans = [...this.cells.spansOf(this.rows[row], View.first, View.last)];
      const isLock = ({ reason }) => META.reasons[reason] === "lock";
      for (const span of [...spans.filter(isLock), ...spans.filter((each) => !isLock(each))]) {
        this.paintSpan(grid, context, row, span); // what began a recovery lies over what only went on with it
      }
    }
  }

  paintSpan(grid, context, row, span) {
    context.fillStyle = Timeline.color(span.reason);
    const from = Math.floor(grid.x(span.first));
    const to = Math.max(Math.round(grid.x(span.last + 1)), from + 2);
    const gap = grid.rowHeight > 5 ? 2 : 0;
    context.fillRect(from, grid.y(row), to - from, Math.max(grid.rowHeight - gap, 1));
  }

  tell(unit, first, last) {
    const where =
      first === last
        ? `step ${first.toLocaleString("en")}`
        : `steps ${first.toLocaleString("en")}–${last.toLocaleString("en")}`;
    const found = this.cells.recovery(unit, first, last);
    const reasons = [...this.cells.spansOf(unit, first, last)].map((span) => META.reasons[span.reason]);
    const why = first < last && reasons.length ? [`reasons: ${[...new Set(reasons)].join(", ")}`] : [];
    const none = this.run.mode === "monitor" ? "not selected" : "on the low path";
    return [this.run.units[unit], where, ...(found.length ? found : [none]), ...why];
  }

  legend(element) {
    const used = [...new Set(this.cells.spans.reason)].sort();
    element.replaceChildren(...used.map((reason) => Legend.swatch(Timeline.color(reason), META.reasons[reason])));
  }
}
