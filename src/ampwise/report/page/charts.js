// Curves over the steps: one chart per metric, zoomed together.

const METRICS = [
  { name: 'loss', title: 'Loss', axis: 'loss', log: 10, always_drawn: true },
  { name: 'scale', title: 'Loss scale', axis: 'loss scale', log: 2, always: true, skips: true },
  { name: 'norm', title: 'Gradient norm', axis: 'norm, unscaled', log: 10, skips: true },
  { name: 'skip_rate', title: 'Skipped', axis: 'share of steps', share: true },
  { name: 'lr', title: 'Learning rate', axis: 'rate', log: 10 },
];
const HEIGHT = 212;
const FEWEST_STEPS = 2; // smallest range to zoom to
const INCREMENTS = [0.1, 0.2, 0.5, 1, 2, 4, 5, 8, 10, 20, 50, 100, 200]; // of logarithmic axes

const charts = { plots: [], markers: [], from: null, to: null, low: 0, last: 1, high: 1, apart: false, listeners: [] };

// The values of a metric in one line, as { mean, low, high, bad }; a rate has no extremes.
function measured(line, metric) {
  const found = line[metric.name];
  if (!found) return null;
  return Array.isArray(found) ? { mean: found, bad: {} } : found;
}

const ends = (values) => values.filter((value) => value !== null);

// Whether a metric is drawn on a logarithmic axis: if it spans a factor of 100 or more.
function base(metric, lines) {
  if (!metric.log) return 0;
  const values = lines.flatMap((line) => {
    const found = measured(line, metric);
    return found ? [...ends(found.low || found.mean), ...ends(found.high || found.mean)] : [];
  });
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  if (!(low > 0)) return 0;
  return metric.always || high >= 100 * low ? metric.log : 0;
}

const logarithm = (value, log) => (log ? Math.log(value) / Math.log(log) : value);

// A line is broken where a value was inf or NaN, and continues over steps at which it was not measured.
function tables(lines, metric, log) {
  return lines.map((line) => {
    const found = measured(line, metric);
    const place = (values) => values.map((value, at) => (value === null ? (found.bad[at] ? null : undefined) : logarithm(value, log)));
    const middle = line.first.map((first, at) => (first + line.last[at]) / 2);
    const mean = place(found.mean);
    return [middle, mean, found.low ? place(found.low) : mean, found.high ? place(found.high) : mean];
  });
}

function written(value, metric, log) {
  if (value === null || value === undefined) return '';
  if (metric.share) return percent(value);
  const plain = log ? log ** value : value;
  const exponent = Math.log2(plain);
  return metric.name === 'scale' && plain >= 2 ** 20 && Number.isInteger(exponent) ? power(2, exponent) : short(plain);
}

function ticks(metric, log) {
  return (plot, splits) => splits.map((value) => {
    if (metric.share) return (value * 100).toFixed(value < 0.1 && value > 0 ? 1 : 0) + '%';
    if (log) return Number.isInteger(value) ? power(log, value) : short(log ** value);
    return short(value);
  });
}

// A line where a finding first occurred, in the colour of its severity, with the number of its card.
function findingMarks(plot) {
  const { ctx, bbox } = plot, ratio = devicePixelRatio, size = 14 * ratio;
  const taken = [];
  ctx.save();
  ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
  ctx.textAlign = 'center';
  ctx.textBaseline = 'middle';
  for (const marker of charts.markers) {
    const x = Math.round(plot.valToPos(Math.max(marker.step, charts.low), 'x', true));
    if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) continue;
    ctx.fillStyle = ctx.strokeStyle = colour(`--${marker.severity}`);
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.lineWidth = ratio;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    let left = Math.min(x, bbox.left + bbox.width - size);
    while (taken.some((other) => Math.abs(other - left) < size + ratio)) left += size + ratio; // beside an earlier flag
    taken.push(left);
    ctx.fillRect(left, bbox.top - size, size, size);
    ctx.fillStyle = colour('--card');
    ctx.fillText(String(marker.number), left + size / 2, bbox.top - size / 2 + ratio);
  }
  ctx.restore();
}

// Short marks at the bottom for skipped steps, at the top for values that are inf or NaN.
function marks(lines, metric) {
  return (plot) => {
    const { ctx, bbox } = plot;
    const tick = 8 * devicePixelRatio;
    const draw = (line, at, top, shade) => {
      const middle = (line.first[at] + line.last[at]) / 2;
      const x = Math.round(plot.valToPos(middle, 'x', true));
      if (x < bbox.left || x > bbox.left + bbox.width) return;
      ctx.fillStyle = shade;
      ctx.fillRect(x - devicePixelRatio * 0.75, top ? bbox.top : bbox.top + bbox.height - tick, devicePixelRatio * 1.5, tick);
    };
    for (const line of lines) {
      const own = (shade) => (line.run ? tint(line, 100) : colour(shade)); // two runs have different colours
      if (metric.skips) line.skipped.forEach((skipped, at) => skipped && draw(line, at, false, own('--soft')));
      for (const at of Object.keys(measured(line, metric).bad)) draw(line, Number(at), true, own('--ink'));
    }
  };
}

const tint = (line, percent) => `color-mix(in srgb, ${colour('--line' + line.colour)} ${percent}%, transparent)`;

// Points are drawn if they are few enough to be distinguished: a value may be measured at some steps only.
function isSparse(plot, series, from, to) {
  let known = 0;
  for (let at = from; at <= to; at += 1) if (plot.data[series][at] !== null && plot.data[series][at] !== undefined) known += 1;
  return known * 10 < plot.bbox.width / devicePixelRatio;
}

function seriesOf(lines) {
  // The edges of a band are drawn, so that a spike of a single step is visible.
  const edge = (line) => ({ stroke: () => tint(line, 45), width: 1, points: { show: false } });
  return lines.flatMap((line) => [
    { label: line.name, stroke: () => tint(line, 100), width: 1.6, dash: line.run === 'after' ? [6, 4] : undefined, points: { size: 4, show: isSparse } }, edge(line), edge(line),
  ]);
}

function bandsOf(lines) {
  return lines.map((line, at) => ({
    series: [at * 3 + 3, at * 3 + 2],
    fill: () => tint(line, 20),
  }));
}

// The range of the value axis.
function rangeOf(metric, log, low, high) {
  if (low === null || high === null) return [0, 1];
  if (metric.share) return [0, Math.max(high, 0.01)];
  const margin = (high - low) * 0.06;
  if (log) return [low - (margin || 1), high + (margin || 1)];
  if (low === high) return uPlot.rangeNum(low, high, 0.06, true);
  return [low >= 0 ? Math.max(0, low - margin) : low - margin, high + margin];
}

function plotted(box, lines, metric, log, readout) {
  const axis = { stroke: () => colour('--soft'), grid: { stroke: () => colour('--rule'), width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
  const options = {
    width: Math.max(box.clientWidth, 200),
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: 'steps', scales: ['x', null] }, drag: { x: true, y: false }, points: { size: 6 } },
    scales: { x: { time: false, range: (plot, low, high) => [low, high] }, y: { range: (plot, low, high) => rangeOf(metric, log, low, high) } },
    padding: [charts.markers.length ? 16 : 8, 12, 0, 0],
    axes: [{ ...axis, size: 24, label: 'step', labelSize: 16, labelGap: 0, labelFont: axis.font, values: (plot, splits) => splits.map((step) => (Number.isInteger(step) ? step.toLocaleString('en-US') : '')) }, { ...axis, size: 52, label: `${metric.axis}${log ? ', log scale' : ''}`, labelSize: 16, labelGap: 2, labelFont: axis.font, incrs: log ? INCREMENTS.filter((each) => each >= 1 || log > 2) : undefined, values: ticks(metric, log) }],
    series: [{}, ...seriesOf(lines)],
    bands: bandsOf(lines),
    hooks: {
      draw: [marks(lines, metric), findingMarks],
      setCursor: [(plot) => readout(plot.cursor.idx)],
      setScale: [(plot, key) => key === 'x' && zoomed(plot.scales.x.min, plot.scales.x.max)],
    },
  };
  return new uPlot(options, uPlot.join(tables(lines, metric, log)), box);
}

// The value of a line near a step, as text.
function spoken(line, metric, step) {
  const found = measured(line, metric);
  let at = -1;
  line.first.forEach((first, place) => { if (first <= step) at = place; });
  if (at < 0) return '';
  const place = steps(line.first[at], line.last[at]);
  if (found.mean[at] === null) return found.bad[at] ? `${place}: inf or NaN` : `${place}: not measured`;
  const value = written(found.mean[at], metric, 0);
  const [low, high] = found.low ? [found.low[at], found.high[at]] : [found.mean[at], found.mean[at]];
  const spread = low === high ? '' : ` (${written(low, metric, 0)} to ${written(high, metric, 0)})`;
  const bad = found.bad[at] ? `, ${found.bad[at]} × inf or NaN` : '';
  const skipped = metric.skips && line.skipped[at] ? `, ${line.skipped[at]} skipped` : '';
  return `${place}: ${value}${spread}${bad}${skipped}`;
}

// Description of the chart for screen readers: first and last value, extremes, anomalies.
function described(lines, metric) {
  return lines.map((line) => {
    const found = measured(line, metric);
    const known = found.mean.map((value, at) => [value, at]).filter(([value]) => value !== null);
    const bad = Object.values(found.bad).reduce((sum, count) => sum + count, 0);
    const odd = bad ? ` Inf or NaN at ${bad} steps.` : '';
    if (!known.length) return `${line.name}: not finite at any step.`;
    const low = Math.min(...(found.low || found.mean).filter((value) => value !== null));
    const high = Math.max(...(found.high || found.mean).filter((value) => value !== null));
    const [start, end] = [known[0], known[known.length - 1]];
    return `${line.name}: from ${written(start[0], metric, 0)} at step ${line.first[start[1]]} to ${written(end[0], metric, 0)} at step ${line.last[end[1]]}, lowest ${written(low, metric, 0)}, highest ${written(high, metric, 0)}.${odd}`;
  }).join(' ');
}

function figureOf(lines, metric, several) {
  const figure = made('figure', '', { class: 'chart', tabindex: '0', role: 'group', 'aria-label': `${metric.title}: ${described(lines, metric)}`, 'data-metric': metric.name });
  const caption = made('figcaption');
  caption.append(made('b', metric.title));
  if (several) for (const line of lines) caption.append(made('span', line.name, { class: `key line${line.colour}` }));
  if (metric.skips && lines.some((line) => line.skipped.some(Boolean))) caption.append(made('span', 'skipped step', { class: 'key skip' }));
  if (lines.some((line) => Object.keys(measured(line, metric).bad).length)) caption.append(made('span', 'inf or NaN', { class: 'key bad' }));
  const readout = made('p', '', { class: 'readout soft' });
  const box = made('div', '', { class: 'plot' });
  caption.append(readout);
  figure.append(caption, box);
  return { figure, box, readout };
}

function drawChart(lines, metric, several, { figure, box, readout }) {
  const finite = lines.filter((line) => ends(measured(line, metric).mean).length);
  if (!finite.length) { box.textContent = 'Not finite at any step.'; return; }
  const log = base(metric, finite);
  const say = (at) => {
    const step = at === null || at === undefined ? null : plot.data[0][at];
    const readings = step === null ? [] : lines.map((line) => [line, spoken(line, metric, step)]).filter(([, words]) => words);
    readout.textContent = readings.map(([line, words]) => (several ? `${line.name}, ${words}` : words)).join(' · ');
  };
  const plot = plotted(box, finite, metric, log, say);
  charts.plots.push(plot);
  figure.addEventListener('keydown', (event) => steered(event, plot, readout));
  figure.addEventListener('blur', () => readout.removeAttribute('aria-live'));
}

// Arrow keys move along the steps and read out the values.
function steered(event, plot, readout) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 };
  const zooms = { '+': 'in', '=': 'in', '-': 'out', 0: 'all' };
  if (event.shiftKey && event.key in { ArrowLeft: 1, ArrowRight: 1 }) zoom(event.key === 'ArrowLeft' ? 'left' : 'right');
  else if (event.key in moves) {
    readout.setAttribute('aria-live', 'polite');
    const [first, last] = plot.series[0].idxs; // of the visible steps
    const at = Math.min(last, Math.max(first, plot.cursor.idx == null ? first : plot.cursor.idx + moves[event.key]));
    plot.setCursor({ left: plot.valToPos(plot.data[0][at], 'x'), top: 10 });
  } else if (event.key in zooms) zoom(zooms[event.key]);
  else return;
  event.preventDefault();
}

// Apply a new range to all charts and notify listeners.
let zooming = false;
function zoomed(from, to) {
  if (zooming || from === null || to === null || (from === charts.from && to === charts.to)) return;
  zooming = true;
  [charts.from, charts.to] = wideEnough(from, to);
  for (const plot of charts.plots) if (plot.scales.x.min !== charts.from || plot.scales.x.max !== charts.to) plot.setScale('x', { min: charts.from, max: charts.to });
  zooming = false;
  tellRange();
}

// A range of at least a few steps, within the run's steps.
function wideEnough(from, to) {
  const { low, high } = charts;
  const span = Math.min(Math.max(to - from, FEWEST_STEPS), high - low);
  const start = Math.min(Math.max((from + to - span) / 2, low), high - span);
  return [start, start + span];
}

function tellRange() {
  const range = one('#range');
  const from = Math.max(charts.low, Math.ceil(charts.from)), to = Math.min(charts.last, Math.floor(charts.to));
  if (range) range.textContent = steps(Math.min(from, to), Math.max(from, to)) + (charts.apart ? ', of each optimizer' : '');
  for (const listener of charts.listeners) listener(charts.from, charts.to);
}

function zoom(how) {
  const { from, to, low, high } = charts;
  const wide = to - from, middle = (from + to) / 2;
  const ranges = {
    all: [low, high],
    in: [middle - wide / 4, middle + wide / 4],
    out: [middle - wide, middle + wide],
    left: [Math.max(low, from - wide / 2), Math.max(low, from - wide / 2) + wide],
    right: [Math.min(high, to + wide / 2) - wide, Math.min(high, to + wide / 2)],
  };
  setRange(...wideEnough(...ranges[how]));
}

function setRange(from, to) {
  if (charts.plots.length) charts.plots[0].setScale('x', { min: from, max: to });
  else { [charts.from, charts.to] = [from, to]; tellRange(); }
}

// Redraw everything, at first and after each change of data or colours; range and focus are kept.
function drawCharts(lines, titles, markers = []) {
  const chosen = charts.from !== null && (charts.from > charts.low || charts.to < charts.high) ? [charts.from, charts.to] : null;
  const focused = document.activeElement?.dataset.metric;
  const walked = charts.plots.find((plot) => plot.root.closest('figure') === document.activeElement)?.cursor.left;
  for (const plot of charts.plots) plot.destroy();
  one('#charts').replaceChildren();
  measure(lines);
  charts.markers = markers;
  fillMarkers();
  const known = METRICS.filter((metric) => isKnown(lines, metric));
  const worth = known.filter((metric) => isWorthIt(lines, metric));
  tellConstants(lines, known.filter((metric) => !worth.includes(metric)));
  const made = worth.map((metric) => ({ metric, having: lines.filter((line) => measured(line, metric)) })).map(({ metric, having }) =>
    ({ metric, having, parts: figureOf(having, { ...metric, title: titles[metric.name] || metric.title }, lines.length > 1) }));
  one('#charts').append(...made.map(({ parts }) => parts.figure)); // all of them, before reading any width
  for (const { metric, having, parts } of made) drawChart(having, metric, lines.length > 1, parts);
  setRange(...(chosen ? wideEnough(...chosen) : [charts.low, charts.high]));
  if (focused) restoreFocus(focused, walked);
}

// The first and last step; a chart of one step has space for a second.
function measure(lines) {
  lines.forEach((line, at) => { line.colour = line.colour ?? at % 6; });
  const ends = lines.map((line) => line.last[line.last.length - 1]);
  const low = Math.min(...lines.map((line) => line.first[0])), last = Math.max(...ends);
  Object.assign(charts, { plots: [], from: null, to: null, low, last, high: Math.max(last, low + 1), apart: new Set(ends).size > 1 && !lines.some((line) => line.run) });
}

function isKnown(lines, metric) {
  if (metric.share) return lines.some((line) => line[metric.name].some(Boolean));
  return lines.some((line) => measured(line, metric));
}

// A number that never changes takes a sentence, not a chart.
function constantOf(line, metric) {
  const found = measured(line, metric);
  if (metric.share || !found || Object.keys(found.bad).length || (metric.skips && line.skipped.some(Boolean))) return null;
  const values = new Set([...ends(found.low || found.mean), ...ends(found.mean), ...ends(found.high || found.mean)]);
  return values.size === 1 && found.mean.length > 2 ? [...values][0] : null;
}

function isWorthIt(lines, metric) {
  return metric.always_drawn || lines.some((line) => measured(line, metric) && constantOf(line, metric) === null);
}

function tellConstants(lines, metrics) {
  const sentences = metrics.map((metric) => {
    const values = lines.filter((line) => measured(line, metric)).map((line) => [line.name, written(constantOf(line, metric), metric, 0)]);
    const same = new Set(values.map(([, value]) => value)).size === 1;
    return `${metric.title}: ${same ? values[0][1] : values.map(([name, value]) => `${value} (${name})`).join(', ')} at every step.`;
  });
  one('#constant').hidden = !sentences.length;
  one('#constant').textContent = sentences.join(' ');
}

// What the numbers on the charts are.
function fillMarkers() {
  one('#markers').hidden = !charts.markers.length;
  one('#markers').replaceChildren(...charts.markers.map((marker) => {
    const item = made('li'), link = made('a', `${marker.name}, from step ${marker.step.toLocaleString('en-US')}`, { href: `#${marker.id}` });
    link.prepend(made('span', marker.number, { class: `flag ${marker.severity}` }));
    item.append(link);
    return item;
  }));
}

function restoreFocus(metric, walked) {
  const figure = one(`[data-metric="${metric}"]`);
  if (!figure) return;
  figure.focus({ preventScroll: true });
  const plot = charts.plots.find((each) => each.root.closest('figure') === figure);
  if (plot && walked >= 0) plot.setCursor({ left: walked, top: 10 });
}

function fitCharts() {
  for (const plot of charts.plots) {
    const width = plot.root.parentElement.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }
}

function startCharts() {
  new ResizeObserver(fitCharts).observe(one('#charts'));
  for (const button of all('[data-zoom]')) button.addEventListener('click', () => zoom(button.dataset.zoom));
  one('#charts').addEventListener('dblclick', () => zoom('all'));
}
