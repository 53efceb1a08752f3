// The charts' common cursor, and the timeline that one can zoom and move. Nothing is fetched; keys do what the mouse does.
"use strict";

// --- charts: the cursor of all charts of a run goes to one step ------------------------------------------------------

function nearest(points, step) {
  let low = 0, high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][1] > step) high = middle; else low = middle;
  }
  return Math.abs(points[low][1] - step) > Math.abs(points[high][1] - step) ? high : low;
}

function showStep(chart, step) {
  const text = [];
  let place = null;
  for (const curve of chart.data) {
    if (!curve.points.length) continue;
    const [x, at, value] = curve.points[nearest(curve.points, step)];
    if (place === null) place = x;
    text.push((chart.data.length > 1 ? curve.name + " " : "") + value + (text.length && at === chart.step ? "" : " at step " + at));
    if (text.length === 1) chart.step = at;
  }
  chart.cursor.setAttribute("x1", place);
  chart.cursor.setAttribute("x2", place);
  chart.output.textContent = text.join(", ");
  chart.figure.setAttribute("aria-valuenow", chart.step);
  chart.figure.setAttribute("aria-valuetext", text.join(", "));
}

function setUpCharts(scope) {
  const charts = Array.from(scope.querySelectorAll("figure.curves"), (figure) => ({
    figure, data: JSON.parse(figure.querySelector("script").textContent),
    lines: figure.querySelector("svg.lines"), cursor: figure.querySelector("line.cursor"),
    output: figure.querySelector("output"), step: null,
  }));
  const showAll = (step) => charts.forEach((chart) => showStep(chart, step));
  for (const chart of charts) {
    const points = chart.data.reduce((most, each) => each.points.length > most.length ? each.points : most, []);
    chart.lines.addEventListener("pointermove", (event) => {
      const frame = chart.lines.getBoundingClientRect();
      const x = (event.clientX - frame.left) / frame.width * 1000;
      const all = chart.data.flatMap((each) => each.points);
      const best = all.reduce((near, each) => Math.abs(each[0] - x) < Math.abs(near[0] - x) ? each : near, all[0]);
      showAll(best[1]);
    });
    chart.figure.addEventListener("keydown", (event) => {
      const far = Math.max(1, Math.round(points.length / 10));
      const moves = {ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -far, PageUp: far};
      const ends = {Home: 0, End: points.length - 1};
      const now = chart.step === null ? points.length - 1 : nearest(points, chart.step);
      const next = event.key in ends ? ends[event.key] : event.key in moves ? now + moves[event.key] : null;
      if (next === null) return;
      event.preventDefault();
      showAll(points[Math.min(points.length - 1, Math.max(0, next))][1]);
    });
  }
}

// --- the timeline: the script draws what is in view, so that a long step stays quick ----------------------------------

const SVG = "http://www.w3.org/2000/svg";
const LANE = 34, BOX = 22, STRIP = 6, AXIS = 20, NAMES = 64; // pixels

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return made;
}

function timeText(nanoseconds) {
  const [size, unit] = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]].find((each) => nanoseconds >= each[0]) || [1, "ns"];
  return Number((nanoseconds / size).toPrecision(6)) + " " + unit;
}

class StepTimeline {
  constructor(frame) {
    this.frame = frame;
    this.data = JSON.parse(frame.querySelector("script").textContent);
    this.output = frame.querySelector("output");
    this.from = 0;
    this.length = this.data.length;
    this.chosen = null; // [rank, box]
    this.height = this.data.ranks.length * LANE + AXIS;
    this.svg = element("svg", {"aria-hidden": "true", height: this.height}); // fixed: what draws must not resize
    frame.querySelector(".lanes").append(this.svg);
    new ResizeObserver(() => this.draw()).observe(frame);
    frame.addEventListener("keydown", (event) => this.key(event));
    frame.addEventListener("click", (event) => this.press(event.target.dataset.do));
    this.listenToPointers();
  }

  get width() { return Math.max(80, this.frame.clientWidth - NAMES); }

  see(from, length) {
    this.length = Math.min(this.data.length, Math.max(length, this.data.length / 1e5));
    this.from = Math.min(this.data.length - this.length, Math.max(0, from));
    this.draw();
  }

  zoom(factor, share = 0.5) { this.see(this.from + this.length * share * (1 - factor), this.length * factor); }

  move(share) { this.see(this.from + this.length * share, this.length); }

  press(what) {
    if (what === "in") this.zoom(0.5);
    if (what === "out") this.zoom(2);
    if (what === "earlier") this.move(-0.25);
    if (what === "later") this.move(0.25);
    if (what === "all") this.see(0, this.data.length);
  }

  key(event) {
    const keys = {"+": () => this.zoomAtChosen(0.5), "=": () => this.zoomAtChosen(0.5), "-": () => this.zoomAtChosen(2),
      "0": () => this.press("all"),
      ArrowLeft: () => event.shiftKey ? this.move(-0.25) : this.choose(0, -1),
      ArrowRight: () => event.shiftKey ? this.move(0.25) : this.choose(0, 1),
      ArrowUp: () => this.choose(-1, 0), ArrowDown: () => this.choose(1, 0)};
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  }

  zoomAtChosen(factor) {
    const box = this.chosen && this.data.ranks[this.chosen[0]].boxes[this.chosen[1]];
    const share = box ? (box[0] + box[1] / 2 - this.from) / this.length : 0.5;
    this.zoom(factor, share >= 0 && share <= 1 ? share : 0.5);
  }

  choose(down, on) {
    let [rank, index] = this.chosen || [0, on > 0 ? -1 : 0];
    const boxes = this.data.ranks[rank].boxes;
    if (down) {
      const time = boxes.length ? boxes[Math.max(0, index)][0] : 0;
      rank = Math.min(this.data.ranks.length - 1, Math.max(0, rank + down));
      const others = this.data.ranks[rank].boxes;
      index = others.findIndex((box) => box[0] + box[1] > time);
      if (index < 0) index = others.length - 1;
    } else {
      index = Math.min(boxes.length - 1, Math.max(0, index + on));
    }
    const box = this.data.ranks[rank].boxes[index];
    if (!box) return;
    this.chosen = [rank, index];
    this.tell(rank, box);
    const isSeen = box[0] >= this.from && box[0] + box[1] <= this.from + this.length;
    if (isSeen) this.draw(); else this.see(box[0] + box[1] / 2 - this.length / 2, this.length);
  }

  tell(rank, box) { this.output.textContent = "rank " + rank + ", " + (box[3] ? box[3] + ": " : "") + box[4]; }

  listenToPointers() {
    let held = null;
    this.svg.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      const share = (event.clientX - this.svg.getBoundingClientRect().left - NAMES) / this.width;
      this.zoom(Math.exp(event.deltaY / 300), Math.min(1, Math.max(0, share)));
    }, {passive: false});
    this.svg.addEventListener("pointerdown", (event) => { held = {x: event.clientX, from: this.from, moved: false}; });
    this.svg.addEventListener("pointermove", (event) => {
      const box = event.target.box;
      if (box) this.tell(event.target.rank, box);
      if (!held || !event.buttons) { held = null; return; }
      if (Math.abs(event.clientX - held.x) > 3) held.moved = true;
      if (held.moved) this.see(held.from - (event.clientX - held.x) / this.width * this.length, this.length);
    });
    this.svg.addEventListener("dblclick", (event) => {
      this.zoom(0.5, (event.clientX - this.svg.getBoundingClientRect().left - NAMES) / this.width);
    });
    this.svg.addEventListener("click", (event) => {
      const {box, rank} = event.target;
      const index = box && !(held && held.moved) ? this.data.ranks[rank].boxes.indexOf(box) : -1;
      if (index < 0) return; // a message, or the end of a drag
      this.chosen = [rank, index];
      this.draw();
    });
  }

  draw() {
    const drawn = document.createDocumentFragment();
    this.scale = this.width / this.length;
    this.data.ranks.forEach((rank, number) => this.drawRank(drawn, rank, number));
    this.drawAxis(drawn);
    this.svg.replaceChildren(drawn);
  }

  drawRank(drawn, rank, number) {
    const top = number * LANE;
    drawn.append(element("text", {class: "name", x: 0, y: top + 16}, "rank " + number));
    this.drawBoxes(drawn, rank.boxes, number, top, BOX);
    this.drawBoxes(drawn, rank.messages, number, top + BOX + 1, STRIP);
  }

  drawBoxes(drawn, boxes, rank, top, height) {
    let end = -1; // in pixels: what is narrower than one and begins in the last one isn't drawn again
    const chosen = this.chosen && this.chosen[0] === rank && boxes === this.data.ranks[rank].boxes ? this.chosen[1] : -1;
    boxes.forEach((box, index) => {
      if (box[0] + box[1] < this.from || box[0] > this.from + this.length) return;
      const left = Math.max(0, (box[0] - this.from) * this.scale);
      const right = Math.min(this.width, (box[0] + box[1] - this.from) * this.scale);
      if (index !== chosen && right < end + 0.5) return;
      end = right;
      const kind = this.data.kinds[box[2]], wide = Math.max(0.75, right - left);
      const rect = element("rect", {x: NAMES + left, y: top, width: wide, height});
      if (kind.style) rect.setAttribute("class", kind.style); else rect.setAttribute("fill", kind.fill);
      if (index === chosen) rect.classList.add("chosen");
      rect.box = box;
      rect.rank = rank;
      rect.append(element("title", {}, (box[3] ? box[3] + ": " : "") + box[4]));
      drawn.append(rect);
      if (height === BOX && kind.ink && wide > 7.5 * box[3].length + 4) {
        drawn.append(element("text", {x: NAMES + left + wide / 2, y: top + 15, fill: kind.ink, "text-anchor": "middle"}, box[3]));
      }
    });
  }

  drawAxis(drawn) {
    const rough = this.length / Math.max(2, this.width / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
    for (let at = Math.ceil(this.from / step) * step; at <= this.from + this.length; at += step) {
      const x = NAMES + (at - this.from) * this.scale;
      const anchor = x > NAMES + this.width - 30 ? "end" : x < NAMES + 30 ? "start" : "middle";
      drawn.append(element("text", {class: "time", x, y: this.height - 5, "text-anchor": anchor}, at ? timeText(at) : "0"));
    }
  }
}

document.querySelectorAll("article, section.overview").forEach(setUpCharts);
document.querySelectorAll(".step-timeline").forEach((frame) => { frame.timeline = new StepTimeline(frame); });
function openTarget() {
  const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
  if (!target) return;
  const around = target.querySelector("details") || target.closest("details");
  if (around) around.open = true;
  target.scrollIntoView();
}
addEventListener("hashchange", openTarget);
openTarget();
