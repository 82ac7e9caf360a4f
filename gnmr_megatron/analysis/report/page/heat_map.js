"use strict";
// Paints GNMR: one colour a cell, the highest where steps share a column, recovered spans outlined.

class HeatMap {
  /**
   * @param {object} run its `meta`.
   * @param {Uint8Array} bytes low and high bytes of the codes.
   * @param {Cells} cells recovered spans and exact values.
   */
  constructor(run, bytes, cells) {
    Object.assign(this, { run, cells, grid: run.grid });
    this.rows = [...Array(this.grid.num_units).keys()];
    this.levels = HeatMap.pyramid(HeatMap.decode(bytes), this.grid.num_units, this.grid.num_steps);
    this.offscreen = document.createElement("canvas");
  }

  static decode(bytes) {
    const count = bytes.length / 2;
    const codes = new Int16Array(count);
    const { offset } = META.codes;
    for (let i = 0; i < count; i++) {
      codes[i] = ((bytes[count + i] << 8) | bytes[i]) - offset; // the array makes it signed
    }
    return codes;
  }

  /** The codes, and their maxima over 16 and over 256 steps. */
  static pyramid(codes, units, steps) {
    const levels = [{ shift: 0, steps, codes }];
    for (const shift of [4, 8]) {
      const below = levels.at(-1);
      const count = Math.ceil(steps / (1 << shift));
      const maxima = new Int16Array(units * count).fill(META.codes.missing);
      for (let unit = 0; unit < units; unit++) {
        for (let i = 0; i < below.steps; i++) {
          const at = unit * count + (i >> 4);
          const value = below.codes[unit * below.steps + i];
          if (value > maxima[at]) {
            maxima[at] = value;
          }
        }
      }
      levels.push({ shift, steps: count, codes: maxima });
    }
    return levels;
  }

  /** The highest code of a unit from one column of the grid up to another. */
  highest(unit, from, to) {
    const [single, middle, coarse] = this.levels;
    let best = META.codes.missing;
    let at = from;
    while (at < to) {
      let level = single;
      if ((at & 15) === 0 && at + 16 <= to) {
        level = (at & 255) === 0 && at + 256 <= to ? coarse : middle;
      }
      const code = level.codes[unit * level.steps + (at >> level.shift)];
      if (code > best) {
        best = code;
      }
      at += 1 << level.shift;
    }
    return best;
  }

  code(unit, first, last) {
    const from = Math.max(first - this.grid.first, 0);
    return this.highest(unit, from, Math.min(last + 1 - this.grid.first, this.grid.num_steps));
  }

  /** Colour of each code from `low` on, as one number a pixel. */
  colors() {
    const { low, high, resolution } = this.grid;
    const [first, last] = [Math.round(low / resolution), Math.round(high / resolution)];
    const stops = META.colors.map((color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16)));
    const table = new Uint32Array(Math.max(last - first + 1, 2));
    for (let i = 0; i < table.length; i++) {
      const at = (i / (table.length - 1)) * (stops.length - 1);
      const left = Math.min(Math.floor(at), stops.length - 2);
      const mixed = stops[left].map((value, k) => Math.round(value + (at - left) * (stops[left + 1][k] - value)));
      table[i] = HeatMap.pixel(mixed);
    }
    return { table, first };
  }

  static pixel([red, green, blue]) {
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  }

  paint(grid, context) {
    this.paintCells(grid, context);
    this.paintSpans(grid, context);
  }

  paintCells(grid, context) {
    const count = grid.bottom - grid.top;
    const image = context.createImageData(grid.columns, count);
    const pixels = new Uint32Array(image.data.buffer);
    const { table, first } = this.colors();
    const notFinite = HeatMap.pixel(HeatMap.notFinite);
    for (let column = 0; column < grid.columns; column++) {
      const steps = grid.steps(column);
      for (let row = 0; row < count; row++) {
        const code = this.code(this.rows[grid.top + row], ...steps);
        if (code >= META.codes.not_finite) {
          pixels[row * grid.columns + column] = notFinite;
        } else if (code > META.codes.missing) {
          pixels[row * grid.columns + column] = table[Math.min(Math.max(code - first, 0), table.length - 1)];
        }
      }
    }
    this.offscreen.width = grid.columns;
    this.offscreen.height = count;
    this.offscreen.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.offscreen, grid.left, 0, grid.plotWidth, grid.plotHeight);
  }

  /** Where what was recovered lies in view; boxes that would touch are one. */
  boxes(grid) {
    const boxes = [];
    for (let row = grid.top; row < grid.bottom; row++) {
      let open = null;
      for (const span of this.cells.spansOf(this.rows[row], View.first, View.last)) {
        const from = Math.max(grid.x(span.first), grid.left - 4);
        const to = Math.min(grid.x(span.last + 1), grid.width + 4);
        if (open && from - open.to < 2) {
          open.to = to;
        } else {
          open = { from, to, row };
          boxes.push(open);
        }
      }
    }
    return boxes;
  }

  paintSpans(grid, context) {
    const boxes = this.boxes(grid);
    const isTight = grid.rowHeight < 9;
    for (const [color, width] of isTight ? [["#ffffff", 1]] : [["#000000", 3.5], ["#ffffff", 1.5]]) {
      context.strokeStyle = color;
      context.lineWidth = width;
      for (const { from, to, row } of boxes) {
        const size = Math.max(to - from, isTight ? 2 : 4);
        const inset = isTight ? 0.5 : 1.75;
        context.strokeRect(from + inset, grid.y(row) + inset, size - 2 * inset, Math.max(grid.rowHeight - 2 * inset, 0.5));
      }
    }
  }

  tell(unit, first, last) {
    const lines = [this.run.units[unit]];
    const code = this.code(unit, first, last);
    if (first === last) {
      lines.push(`step ${first.toLocaleString("en")}`, ...this.cells.values(unit, first, this.value(code)));
    } else {
      const range = `steps ${first.toLocaleString("en")}–${last.toLocaleString("en")}`;
      lines.push(range, `highest GNMR ${this.value(code)}`);
    }
    lines.push(...this.cells.recovery(unit, first, last));
    return lines;
  }

  /** GNMR of a code, in words. */
  value(code) {
    const { missing, zero, not_finite: notFinite } = META.codes;
    if (code === missing) {
      return "not recorded";
    }
    if (code === zero || code === notFinite) {
      return code === zero ? "0" : "not finite";
    }
    const { resolution } = this.grid;
    return `${Math.exp(code * resolution).toPrecision(3)} (± ${(50 * resolution).toPrecision(2)} %)`;
  }

  legend(element) {
    const scale = Object.assign(document.createElement("span"), { className: "scale" });
    const bar = document.createElement("canvas");
    const { table } = this.colors();
    [bar.width, bar.height] = [table.length, 1];
    const image = new ImageData(table.length, 1);
    new Uint32Array(image.data.buffer).set(table);
    bar.getContext("2d").putImageData(image, 0, 0);
    const number = (log) => Math.exp(log).toPrecision(2);
    scale.append(`GNMR ${number(this.grid.low)} or less`, bar, `${number(this.grid.high)} or more`);
    const outlined = Legend.swatch("#5a6270", this.run.mode === "monitor" ? "selected" : "recovered");
    outlined.firstChild.style.border = "2px solid #ffffff";
    outlined.firstChild.style.outline = "1px solid #000000";
    element.replaceChildren(scale, outlined, Legend.swatch(`rgb(${HeatMap.notFinite})`, "not finite"));
  }
}
HeatMap.notFinite = [230, 60, 140];

const Legend = {
  swatch(color, text) {
    const item = document.createElement("span");
    const box = document.createElement("i");
    box.style.background = color;
    item.append(box, text);
    return item;
  },
};
