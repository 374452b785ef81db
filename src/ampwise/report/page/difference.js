// Difference page: the error of each module by depth, forward and backward, on a logarithmic axis.

const drawn = { data: null, plots: [] };
const TALL = 240;
const LOWEST = 1e-12; // a smaller error counts as 0

const exponents = (values) => values.map((value) => (value === null || value < LOWEST ? null : Math.log10(value)));
const worded = (value) => (value === null ? '' : value < 1e-5 ? short(Number(value.toPrecision(2))) : `${Number((value * 100).toPrecision(2))}%`);

// The error of a module, as text.
function describe(pass, at) {
  const name = drawn.data.names[at];
  if (pass.infinite.includes(at)) return `${name}: not finite on one side, or different shapes`;
  if (pass.errors[at] === null) return `${name}: not compared`;
  const explained = pass.explained[at] === null ? '' : `, rounding explains ${worded(pass.explained[at])}`;
  return `${name}: ${pass.errors[at] === 0 ? 'the same' : `${worded(pass.errors[at])} off`}${explained}${pass.beyond.includes(at) ? ', beyond' : ''}`;
}

// Description of the chart for screen readers.
function summed(pass) {
  const known = pass.errors.map((value, at) => [value, at]).filter(([value]) => value !== null && value > 0);
  if (!known.length) return 'No module differs.';
  const worst = known.reduce((most, one) => (one[0] > most[0] ? one : most));
  const odd = pass.beyond.length ? ` Beyond what rounding explains: ${pass.beyond.map((at) => drawn.data.names[at]).join(', ')}.` : '';
  return `From ${worded(known[0][0])} at the first module that differs to ${worded(known[known.length - 1][0])} at the last, at most ${worded(worst[0])} at ${drawn.data.names[worst[1]]}.${odd}`;
}

// Points beyond what rounding explains in the colour of errors, and marks at the top for infinite values.
function flags(pass) {
  return (plot) => {
    const { ctx, bbox } = plot, dot = 4 * devicePixelRatio;
    ctx.fillStyle = colour('--lost');
    for (const at of pass.beyond) {
      if (pass.errors[at] === null || pass.errors[at] < LOWEST) continue;
      ctx.beginPath();
      ctx.arc(plot.valToPos(at, 'x', true), plot.valToPos(Math.log10(pass.errors[at]), 'y', true), dot, 0, 2 * Math.PI);
      ctx.fill();
    }
    for (const at of pass.infinite) ctx.fillRect(plot.valToPos(at, 'x', true) - devicePixelRatio, bbox.top, 2 * devicePixelRatio, 3 * dot);
  };
}

function chartOf(pass, box, readout) {
  const axis = { stroke: () => colour('--soft'), grid: { stroke: () => colour('--rule'), width: 1 }, ticks: { show: false }, font: '11px system-ui, sans-serif' };
  const known = [...exponents(pass.errors), ...exponents(pass.explained)].filter((value) => value !== null);
  const [low, high] = known.length ? [Math.min(...known), Math.max(...known)] : [-3, 0];
  const points = { size: 5, show: pass.errors.length < 200 };
  return new uPlot({
    width: Math.max(box.clientWidth, 200),
    height: TALL,
    padding: [8, 12, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: 'modules', scales: ['x', null] }, drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: false, range: (plot, from, to) => [from - 0.5, to + 0.5] }, y: { range: () => [low - 0.3, high + 0.3] } },
    axes: [
      { ...axis, size: 24, label: 'module, in the order of calls', labelSize: 16, labelGap: 0, labelFont: axis.font, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000], values: (plot, splits) => splits.map((at) => (Number.isInteger(at) ? String(at + 1) : '')) },
      { ...axis, size: 54, label: 'relative error, log scale', labelSize: 16, labelGap: 2, labelFont: axis.font, incrs: [0.1, 0.2, 0.5, 1, 2, 4, 8], values: (plot, splits) => splits.map((value) => worded(10 ** value)) },
    ],
    series: [
      {},
      { label: 'error', stroke: () => colour(pass.colour), width: 1.8, points, spanGaps: true },
      { label: 'explained', stroke: () => colour('--soft'), width: 1.2, dash: [6, 4], points: { show: false }, spanGaps: true },
    ],
    hooks: { draw: [flags(pass)], setCursor: [(plot) => { readout.textContent = plot.cursor.idx == null ? '' : describe(pass, plot.cursor.idx); }] },
  }, [pass.errors.map((_, at) => at), exponents(pass.errors), exponents(pass.explained)], box);
}

// Arrow keys move along the modules and read out the errors.
function walked(event, plot, readout) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
  if (!(event.key in moves)) return;
  const last = plot.data[0].length - 1;
  const at = plot.cursor.idx == null ? 0 : Math.min(last, Math.max(0, plot.cursor.idx + moves[event.key]));
  readout.setAttribute('aria-live', 'polite');
  plot.setCursor({ left: plot.valToPos(at, 'x'), top: 10 });
  event.preventDefault();
}

function figureFor(pass) {
  const figure = made('figure', '', { class: 'chart', tabindex: '0', role: 'group', 'aria-label': `${pass.title}: ${summed(pass)}` });
  const caption = made('figcaption');
  caption.append(made('b', pass.title), made('span', 'error', { class: `key ${pass.key}` }), made('span', `dashed: ${drawn.data.limit}× rounding`));
  if (pass.beyond.length) caption.append(made('span', 'beyond', { class: 'key beyond' }));
  const box = made('div', '', { class: 'plot' }), readout = made('p', '', { class: 'readout soft' });
  caption.append(readout);
  figure.append(caption, box);
  return { figure, box, readout };
}

function drawAll() {
  const passes = drawn.data.passes.filter((pass) => pass.errors.some((value) => value !== null) || pass.infinite.length);
  one('#depth').hidden = !passes.length;
  for (const plot of drawn.plots) plot.destroy();
  const figures = passes.map((pass) => ({ pass, ...figureFor(pass) }));
  one('#depth-charts').replaceChildren(...figures.map(({ figure }) => figure));
  drawn.plots = figures.map(({ pass, figure, box, readout }) => {
    const plot = chartOf(pass, box, readout);
    figure.addEventListener('keydown', (event) => walked(event, plot, readout));
    return plot;
  });
}

function fitAll() {
  for (const plot of drawn.plots) {
    const width = plot.root.parentElement.clientWidth;
    if (width && width !== plot.width) plot.setSize({ width, height: TALL });
  }
}

unpacked(one('#data').textContent).then((data) => {
  one('#no-charts').remove();
  drawn.data = data;
  drawAll();
  new ResizeObserver(fitAll).observe(one('#depth-charts'));
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', drawAll);
  addEventListener('beforeprint', () => { document.documentElement.dataset.paper = ''; drawAll(); });
  addEventListener('afterprint', () => { delete document.documentElement.dataset.paper; drawAll(); });
  document.documentElement.dataset.ready = '';
  markSection();
});
