"use strict";
// The steps that all plots show.

const View = {
  listeners: [],

  start(first, last) {
    View.all = { first, last };
    View.first = first;
    View.last = last;
    View.inputs = { first: document.getElementById("from"), last: document.getElementById("to") };
    for (const input of Object.values(View.inputs)) {
      input.min = first;
      input.max = last;
    }
    const form = document.getElementById("range");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      View.set(Number(View.inputs.first.value), Number(View.inputs.last.value));
    });
    for (const input of Object.values(View.inputs)) {
      input.addEventListener("change", () => form.requestSubmit());
    }
    for (const button of form.querySelectorAll("[data-move]")) {
      button.addEventListener("click", () => View.move(button.dataset.move));
    }
    document.querySelector(".bar").hidden = false;
    View.show();
  },

  show() {
    View.inputs.first.value = View.first;
    View.inputs.last.value = View.last;
  },

  set(first, last) {
    const { all } = View;
    let from = Math.round(Math.min(first, last)) || all.first;
    let to = Math.round(Math.max(first, last)) || all.last;
    from = Math.min(Math.max(from, all.first), all.last);
    to = Math.min(Math.max(to, all.first), all.last);
    const changed = from !== View.first || to !== View.last;
    View.first = from;
    View.last = to;
    View.show();
    if (changed) {
      for (const listener of View.listeners) {
        listener();
      }
    }
  },

  /** Shows so many steps, with one of them at its place in the view. */
  zoom(factor, step = (View.first + View.last) / 2) {
    const { all } = View;
    const shown = View.last - View.first + 1;
    const wanted = Math.min(Math.max(Math.round(shown * factor), 1), all.last - all.first + 1);
    const share = (step - View.first + 0.5) / shown;
    View.slideTo(Math.round(step + 0.5 - share * wanted), wanted);
  },

  slideTo(first, shown) {
    const from = Math.min(Math.max(first, View.all.first), View.all.last - shown + 1);
    View.set(from, from + shown - 1);
  },

  move(where) {
    const shown = View.last - View.first + 1;
    const stride = Math.max(Math.round(shown / 3), 1);
    const moves = {
      in: () => View.zoom(1 / 3),
      out: () => View.zoom(3),
      left: () => View.slideTo(View.first - stride, shown),
      right: () => View.slideTo(View.first + stride, shown),
      all: () => View.set(View.all.first, View.all.last),
    };
    moves[where]();
  },
};
