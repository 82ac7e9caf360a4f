"use strict";
// A canvas of units and steps: axes, zoom, pointer and keys. What a cell looks like and says is the painter's.

class Grid {
  /**
   * @param {HTMLElement} figure that holds the canvas.
   * @param {object} painter `rows`: unit indices; `paint(grid, context)`; `tell(unit, first, last)`: lines of text on
   *   the steps of a column, the first of which is the headline; `legend(element)`.
   * @param {string[]} names of the units, short.
   */
  constructor(figure, painter, names) {
    Object.assign(this, { figure, painter, names });
    this.canvas = figure.querySelector("canvas.map");
    this.tip = figure.querySelector(".tip");
    this.told = figure.querySelector(".told");
    this.top = 0; // of the rows in view
    this.bottom = painter.rows.length;
    this.cursor = null;
    this.drag = null;
    this.listen();
    View.listeners.push(() => this.draw());
    Theme.listeners.push(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
  }

  showRows(rows) {
    this.painter.rows = rows;
    [this.top, this.bottom] = [0, rows.length];
    this.cursor = null;
    this.draw();
  }

  /** Sizes in CSS pixels; none while the canvas is hidden. */
  measure() {
    const width = this.canvas.parentElement.clientWidth;
    const count = this.bottom - this.top;
    const isNarrow = width < 560;
    const most = isNarrow ? 420 : 560;
    this.rowHeight = Math.min(Math.max(most / Math.max(count, 1), 1), count <= 4 ? 34 : 24);
    this.left = isNarrow ? 62 : 76;
    this.plotWidth = width - this.left - 2;
    this.plotHeight = Math.max(Math.round(this.rowHeight * count), 1);
    this.width = width;
    this.height = this.plotHeight + 26;
    this.shown = View.last - View.first + 1;
    this.columns = Math.min(this.shown, Math.max(Math.floor(this.plotWidth), 1));
  }

  x(step) {
    return this.left + ((step - View.first) / this.shown) * this.plotWidth;
  }

  y(row) {
    return (row - this.top) * this.rowHeight;
  }

  /** First and last step of a column. */
  steps(column) {
    const first = View.first + Math.floor((column * this.shown) / this.columns);
    const next = View.first + Math.floor(((column + 1) * this.shown) / this.columns);
    return [first, Math.max(next - 1, first)];
  }

  draw() {
    if (!this.canvas.parentElement.clientWidth) {
      return;
    }
    this.measure();
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.height = `${this.height}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.clearRect(0, 0, this.width, this.height);
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.plotWidth, this.plotHeight);
    context.clip();
    this.painter.paint(this, context);
    this.drawMarks(context);
    context.restore();
    this.drawAxes(context);
    this.painter.legend(this.figure.querySelector(".legend"));
  }

  drawMarks(context) {
    if (this.cursor && document.activeElement === this.canvas) {
      const [first, last] = this.steps(this.cursor.column);
      const size = [Math.max(this.x(last + 1) - this.x(first), 4), Math.max(this.rowHeight, 4)];
      context.lineWidth = 2;
      context.strokeStyle = Theme.color("ink");
      context.strokeRect(this.x(first) - 1, this.y(this.cursor.row) - 1, size[0] + 2, size[1] + 2);
    }
    if (this.drag && this.drag.moved) {
      const { from, to } = this.drag;
      context.fillStyle = "rgba(128, 160, 200, 0.3)";
      context.strokeStyle = Theme.color("ink");
      context.lineWidth = 1;
      const box = [Math.min(from.x, to.x), Math.min(from.y, to.y), Math.abs(from.x - to.x), Math.abs(from.y - to.y)];
      context.fillRect(...box);
      context.strokeRect(...box);
    }
  }

  drawAxes(context) {
    context.fillStyle = Theme.color("quiet");
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.max(Math.ceil(14 / this.rowHeight), 1);
    const stride = every > 1 ? Math.ceil(every / 4) * 4 : 1; // begins with a layer where a layer has four units
    for (let row = this.top; row < this.bottom; row += stride) {
      const name = this.names[this.painter.rows[row]];
      context.fillText(this.fitted(context, name), this.left - 7, this.y(row) + Math.max(this.rowHeight / 2, 6));
    }
    context.textAlign = "center";
    const target = Math.max(Math.floor(this.plotWidth / 90), 2);
    for (const step of Grid.ticks(View.first, View.last, target)) {
      const x = this.x(step + 0.5);
      context.fillRect(Math.round(x), this.plotHeight, 1, 5);
      const text = step.toLocaleString("en");
      const half = context.measureText(text).width / 2;
      const center = Math.min(Math.max(x, this.left + half - 20), this.width - half - 1);
      context.fillText(text, center, this.plotHeight + 15);
    }
  }

  fitted(context, name) {
    let text = name;
    while (text.length > 3 && context.measureText(text).width > this.left - 10) {
      text = `${text.slice(0, -2)}…`;
    }
    return text;
  }

  /** Whole, round steps within a range. */
  static ticks(first, last, target) {
    const raw = Math.max((last - first) / target, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const stride = Math.max([1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw), 1);
    const found = [];
    for (let step = Math.ceil(first / stride) * stride; step <= last; step += stride) {
      found.push(step);
    }
    return found.length ? found : [first];
  }

  // pointer

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => this.forget());
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("dblclick", () => this.reset());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.draw());
    canvas.addEventListener("blur", () => this.draw());
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  /** The cell at a place, or null outside. */
  cellAt({ x, y }) {
    const column = Math.floor(((x - this.left) / this.plotWidth) * this.columns);
    const row = this.top + Math.floor(y / this.rowHeight);
    const isInside = column >= 0 && column < this.columns && row >= this.top && row < this.bottom && y >= 0;
    return isInside && y < this.plotHeight ? { column, row } : null;
  }

  press(event) {
    if (event.button === 0) {
      const from = this.place(event);
      this.drag = { from, to: from, moved: false, first: View.first, isTouch: event.pointerType === "touch" };
      this.canvas.setPointerCapture(event.pointerId);
    }
  }

  hover(event) {
    const at = this.place(event);
    if (this.drag) {
      const { drag } = this;
      drag.to = at;
      drag.moved ||= Math.hypot(at.x - drag.from.x, at.y - drag.from.y) > 6;
      if (drag.isTouch && drag.moved) {
        View.slideTo(drag.first - Math.round(((at.x - drag.from.x) / this.plotWidth) * this.shown), this.shown);
      } else {
        this.draw();
      }
      this.tip.hidden = true;
      return;
    }
    this.showTip(this.cellAt(at), at);
  }

  release(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag) {
      return;
    }
    if (drag.moved && !drag.isTouch) {
      this.zoomTo(drag.from, drag.to);
    } else if (!drag.moved) {
      const at = this.place(event);
      this.point(this.cellAt(at));
      this.showTip(this.cellAt(at), at);
    }
    this.draw();
  }

  forget() {
    this.drag = null;
    this.draw();
  }

  zoomTo(from, to) {
    const limit = (value, low, high) => Math.min(Math.max(value, low), high);
    const step = ({ x }) => View.first + ((limit(x, this.left, this.width - 3) - this.left) / this.plotWidth) * this.shown;
    const row = ({ y }) => this.top + limit(y, 0, this.plotHeight - 1) / this.rowHeight;
    const steps = [Math.floor(Math.min(step(from), step(to))), Math.floor(Math.max(step(from), step(to)))];
    const rows = [Math.floor(Math.min(row(from), row(to))), Math.ceil(Math.max(row(from), row(to)))];
    if (Math.abs(from.y - to.y) > 6) {
      [this.top, this.bottom] = [rows[0], Math.max(rows[1], rows[0] + 1)];
    }
    this.cursor = null;
    View.set(steps[0], steps[1]);
    this.draw();
  }

  reset() {
    [this.top, this.bottom] = [0, this.painter.rows.length];
    View.move("all");
    this.draw();
  }

  wheel(event) {
    if (event.ctrlKey) {
      event.preventDefault();
      const cell = this.cellAt(this.place(event));
      View.zoom(event.deltaY > 0 ? 1.25 : 0.8, cell ? this.steps(cell.column)[0] : undefined);
    }
  }

  showTip(cell, at) {
    this.tip.hidden = !cell;
    if (!cell) {
      return;
    }
    const lines = this.painter.tell(this.painter.rows[cell.row], ...this.steps(cell.column));
    const [head, ...rest] = lines;
    const title = document.createElement("b");
    title.textContent = head;
    const spans = rest.map((text) => Object.assign(document.createElement("span"), { textContent: text }));
    this.tip.replaceChildren(title, ...spans);
    const { offsetWidth, offsetHeight } = this.tip;
    const left = at.x + 16 + offsetWidth > this.width ? at.x - offsetWidth - 16 : at.x + 16;
    this.tip.style.left = `${Math.min(Math.max(left, 0), Math.max(this.width - offsetWidth, 0))}px`;
    this.tip.style.top = `${at.y + 16 + offsetHeight > this.height ? at.y - offsetHeight - 12 : at.y + 16}px`;
  }

  // keys

  /** Puts the cursor on a cell and tells of it. */
  point(cell) {
    if (cell) {
      this.cursor = cell;
      const lines = this.painter.tell(this.painter.rows[cell.row], ...this.steps(cell.column));
      this.told.textContent = lines.join("; ");
    }
  }

  key(event) {
    const moves = {
      ArrowLeft: [-1, 0],
      ArrowRight: [1, 0],
      ArrowUp: [0, -1],
      ArrowDown: [0, 1],
      PageUp: [-10, 0],
      PageDown: [10, 0],
    };
    const zooms = { "+": 1 / 3, "=": 1 / 3, "-": 3 };
    if (event.ctrlKey || event.metaKey || event.altKey) {
      return;
    }
    if (moves[event.key]) {
      this.moveCursor(...moves[event.key]);
    } else if (zooms[event.key]) {
      this.zoomAtCursor(zooms[event.key]);
    } else if (event.key === "0" || event.key === "Home") {
      this.reset();
    } else {
      return;
    }
    event.preventDefault();
    this.draw();
  }

  moveCursor(columns, rows) {
    const now = this.cursor || { column: 0, row: this.top };
    let column = this.cursor ? now.column + columns : now.column;
    const row = Math.min(Math.max(this.cursor ? now.row + rows : now.row, this.top), this.bottom - 1);
    if (column < 0 || column >= this.columns) {
      const [first] = this.steps(Math.min(Math.max(now.column, 0), this.columns - 1));
      View.slideTo(View.first + (column < 0 ? -1 : 1) * Math.ceil(this.shown / 4), this.shown);
      column = Math.floor(((first - View.first) / this.shown) * this.columns) + Math.sign(columns);
    }
    this.point({ column: Math.min(Math.max(column, 0), this.columns - 1), row });
  }

  zoomAtCursor(factor) {
    const step = this.cursor ? this.steps(this.cursor.column)[0] : undefined;
    View.zoom(factor, step);
    this.measure();
    if (this.cursor) {
      const column = Math.floor(((step - View.first + 0.5) / this.shown) * this.columns);
      this.point({ column: Math.min(Math.max(column, 0), this.columns - 1), row: this.cursor.row });
    }
  }
}
