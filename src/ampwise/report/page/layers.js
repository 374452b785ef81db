// Histogram of one layer's gradients over powers of two, with the ranges of formats, at a chosen loss scale.

const FATES = ['lost', 'subnormal', 'normal', 'overflow'];
const layers = { list: [], formats: [], chosen: 0, format: 'fp16', k: 0, runs: 0 };
const BARS = { width: 900, height: 170, strip: 16, left: 48, right: 8, top: 14, foot: 36 };

const formatOf = (name) => layers.formats.find((format) => format.name === name);
const counted = ([low, high], total) => [...new Set([percent(low / total), percent(high / total)])].join(' to ');
const exactly = ([low, high]) => (low === high ? low.toLocaleString('en-US') : `${low.toLocaleString('en-US')} to ${high.toLocaleString('en-US')}`) + ' values';

function svg(tag, attributes, text = '') {
  const element = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

// The range of powers of two on the axis: the same for all layers, so that they can be compared.
function bounds() {
  const held = layers.list.filter((layer) => layer.counts.length);
  if (!held.length) return [-24, 0];
  const high = Math.max(...held.map((layer) => layer.lowest + layer.counts.length - 1)) + 3;
  // A few tiny values do not stretch the axis: they are in the bar at its end.
  const starts = held.map((layer) => {
    const few = nonzeros(layer) * 1e-5;
    let sum = 0;
    return layer.lowest + layer.counts.findIndex((count) => (sum += count) > few);
  });
  return [Math.max(Math.min(...starts) - 3, high - 80), high];
}

function drawBars() {
  const picture = one('#bars'), layer = layers.list[layers.chosen], format = formatOf(layers.format);
  if (!layer) return;
  BARS.width = Math.max(picture.clientWidth, 240); // a unit is a pixel: text has its size on every screen
  const [low, high] = bounds();
  const wide = (BARS.width - BARS.left - BARS.right) / (high - low + 1);
  const x = (exponent) => BARS.left + (Math.min(Math.max(exponent, low), high + 1) - low) * wide;
  const tall = BARS.top + BARS.height + BARS.foot + layers.formats.length * (BARS.strip + 3);
  picture.setAttribute('height', tall);
  picture.setAttribute('viewBox', `0 0 ${BARS.width} ${tall}`);
  picture.setAttribute('aria-label', barWords(layer, format));
  picture.replaceChildren(...barShapes(layer, format, x, wide, low), ...axisShapes(x, low, high), ...layers.formats.map((each, at) => stripShapes(each, at, x, low, high)));
}

function barShapes(layer, format, x, wide, low) {
  const log = one('#logarithmic').checked;
  const heights = {};
  layer.counts.forEach((count, place) => { const at = Math.max(layer.lowest + place, low); heights[at] = (heights[at] || 0) + count; });
  const size = (count) => (log ? Math.log1p(count) : count);
  const tallest = Math.max(1, ...Object.values(heights).map(size));
  const most = Math.max(0, ...Object.values(heights)) / Math.max(1, nonzeros(layer));
  const axis = [[BARS.top, percent(most)], [BARS.top + BARS.height, '0']].map(([y, words]) => svg('text', { x: BARS.left - 6, y: y + 4, 'text-anchor': 'end' }, words));
  axis.push(svg('text', { x: BARS.left + 4, y: BARS.top - 2 }, `share of the nonzero values${log ? ', logarithmic' : ''}`));
  const bars = Object.entries(heights).filter(([, count]) => count).map(([at, count]) => {
    const height = Math.max(1, (BARS.height * size(count)) / tallest);
    const fate = fateOfBinade(Number(at), format, layers.k);
    const bar = svg('rect', { x: x(Number(at)) + 0.5, y: BARS.top + BARS.height - height, width: Math.max(1, wide - 1), height, class: `fate-${fate}` });
    const from = Number(at) === low && layer.lowest < low ? 'at most' : `${power(2, at)} to`;
    bar.append(svg('title', {}, `${from} ${power(2, Number(at) + 1)}: ${count.toLocaleString('en-US')} values, ${fate}`));
    return bar;
  });
  return [...axis, ...bars];
}

function axisShapes(x, low, high) {
  const foot = BARS.top + BARS.height;
  const pixels = (BARS.width - BARS.left - BARS.right) / (high - low + 1); // of one power of two
  const every = [2, 4, 8, 16, 32].find((each) => each * pixels >= 36) || 64;
  const shapes = [svg('path', { class: 'axis', d: `M${BARS.left} ${foot}H${BARS.width - BARS.right}` })];
  shapes.push(svg('text', { x: (BARS.left + BARS.width) / 2, y: foot + 29, 'text-anchor': 'middle' }, BARS.width > 560 ? 'magnitude of the unscaled gradient; below: what each format makes of it' : 'magnitude of the unscaled gradient'));
  for (let at = Math.ceil(low / every) * every; at <= high + 1; at += every) shapes.push(svg('text', { x: x(at), y: foot + 14, 'text-anchor': 'middle' }, power(2, at)));
  return shapes;
}

// A format's range at this scale: flushed to zero, subnormal, normal, overflow.
function stripShapes(format, place, x, low, high) {
  const y = BARS.top + BARS.height + BARS.foot + place * (BARS.strip + 3);
  const group = svg('g', { class: format.name === layers.format ? 'chosen' : '' });
  const edges = [low, (format.flush ?? low) - layers.k, format.lowest - layers.k, format.overflow_binade + 1 - layers.k, high + 1];
  group.append(svg('text', { x: BARS.left - 6, y: y + BARS.strip - 4, 'text-anchor': 'end' }, format.label));
  FATES.forEach((fate, at) => {
    const from = x(edges[at]), to = x(edges[at + 1]);
    if (to <= from) return;
    const part = svg('rect', { x: from, y, width: to - from, height: BARS.strip, class: `strip edge fate-${fate}` });
    part.append(svg('title', {}, `${format.label}: ${fate}`));
    group.append(part);
    if (to - from > fate.length * 6.5 + 6) group.append(svg('text', { x: (from + to) / 2, y: y + BARS.strip - 4, 'text-anchor': 'middle', class: `in-strip on-${fate}` }, fate));
  });
  return group;
}

function barWords(layer, format) {
  const fates = fatesOf(layer, format, layers.k);
  if (!fates.total) return `${layer.name}: all zeros`;
  return `${layer.name} in ${format.label} at a loss scale of ${power(2, layers.k)}: ` + FATES.map((fate) => `${fate} ${counted(fates[fate], fates.total)}`).join(', ');
}

function fillFates() {
  const layer = layers.list[layers.chosen];
  const rows = layers.formats.map((format) => {
    const fates = fatesOf(layer, format, layers.k);
    const row = made('tr', '', { 'data-format': format.name, ...(format.name === layers.format ? { 'data-chosen': '' } : {}) });
    row.append(made('td', format.label));
    for (const fate of FATES) row.append(made('td', fates.total ? counted(fates[fate], fates.total) : '', { 'data-fate-of': fate, 'data-low': fates[fate][0], 'data-high': fates[fate][1], title: exactly(fates[fate]) }));
    return row;
  });
  one('#fates tbody').replaceChildren(...rows);
  const others = [['zero', layer.zeros], ['inf', layer.infs], ['NaN', layer.nans]].filter(([, count]) => count).map(([what, count]) => `${count.toLocaleString('en-US')} ${what}`);
  one('#fates-others').textContent = `${nonzeros(layer).toLocaleString('en-US')} values over ${layer.steps.toLocaleString('en-US')} sampled step${layer.steps === 1 ? '' : 's'}${others.length ? ', plus ' + others.join(', ') : ''}.`;
}

// The table column that depends on the slider.
function fillColumn() {
  const format = formatOf(layers.format);
  for (const heading of all('[data-fate-heading]')) heading.textContent = `in ${format.label} at ${power(2, layers.k)}`;
  for (const cell of all('[data-fate]')) {
    const layer = layers.list[cell.dataset.fate];
    if (!layer) continue;
    const fates = fatesOf(layer, format, layers.k);
    const bar = made('span', '', { class: 'small-bar', title: barWords(layer, format) });
    for (const fate of fates.total ? FATES : []) {
      const part = made('span', '', { class: `fate-${fate}` });
      part.style.width = `${(fates[fate][fate === 'normal' ? 1 : 0] / fates.total) * 100}%`;
      bar.append(part);
    }
    const said = fates.overflow[1] ? `overflow ${counted(fates.overflow, fates.total)}` : fates.lost[0] ? `lost ${percent(fates.lost[0] / fates.total)}` : '';
    cell.replaceChildren(bar, document.createTextNode(said));
  }
  for (const link of all('[data-layer]')) link.closest('tr').toggleAttribute('aria-current', Number(link.dataset.layer) === layers.chosen);
}

function drawLayer() {
  if (!layers.list.length) return;
  const scale = 2 ** layers.k;
  one('#scale').value = layers.k;
  const asInRun = layers.k === layers.runs ? `, ${layers.list[layers.chosen].exact ? '' : 'about '}as at the end of the run` : '';
  one('#scale-value').textContent = `${power(2, layers.k)} = ${scale >= 1 && scale < 1e7 ? scale.toLocaleString('en-US') : short(scale)}${asInRun}`;
  one('#layer').value = layers.chosen;
  drawBars();
  fillFates();
  fillColumn();
}

function chooseLayer(place, show) {
  const followed = layers.k === layers.runs;
  one('#histogram-fold').open = true;
  layers.chosen = place;
  layers.runs = layers.list[place].exponent; // of its own optimizer
  if (followed) layers.k = layers.runs;
  drawLayer();
  if (show) { one('#histogram').scrollIntoView({ block: 'nearest' }); one('#scale').focus({ preventScroll: true }); }
}

function setScale(k) {
  const slider = one('#scale');
  layers.k = Math.min(Number(slider.max), Math.max(Number(slider.min), k));
  drawLayer();
  if (k > layers.k) one('#scale-value').textContent += `, and up to ${power(2, k)} would fit`;
}

function setLayers(data) {
  const before = layers.list[layers.chosen]?.name; // which names the optimizer too, where there are several
  const first = !layers.list.length;
  Object.assign(layers, { list: data.layers, formats: data.formats });
  one('#histogram').hidden = !layers.list.length;
  if (!layers.list.length) return;
  // At first the worst layer that is not all zeros: that histogram would be empty.
  layers.chosen = Math.max(0, layers.list.findIndex((layer) => (first ? layer.counts.length : layer.name === before)));
  const followed = layers.k === layers.runs;
  layers.runs = layers.list[layers.chosen].exponent;
  if (first || followed) layers.k = layers.runs;
  one('#layer').replaceChildren(...layers.list.map((layer, at) => made('option', layer.name, { value: at })));
  if (first) { layers.format = data.format; fillFormats(); }
  one('#fates-about').textContent = data.about_fates;
  drawLayer();
}

function fillFormats() {
  one('#formats').replaceChildren(...layers.formats.map((format) => {
    const label = made('label');
    const button = made('input', '', { type: 'radio', name: 'format', value: format.name });
    button.checked = format.name === layers.format;
    label.append(button, ` ${format.label}`);
    return label;
  }));
}

function startLayers() {
  new ResizeObserver(drawBars).observe(one('#histogram'));
  one('#scale').addEventListener('input', (event) => setScale(Number(event.target.value)));
  one('#scale-run').addEventListener('click', () => setScale(layers.runs));
  one('#scale-best').addEventListener('click', () => setScale(largestThatFits(layers.list, formatOf(layers.format))));
  one('#layer').addEventListener('change', (event) => chooseLayer(Number(event.target.value), false));
  one('#logarithmic').addEventListener('change', drawBars);
  one('#formats').addEventListener('change', (event) => { layers.format = event.target.value; drawLayer(); });
  document.addEventListener('click', (event) => {
    const link = event.target.closest('[data-layer]');
    if (link) { event.preventDefault(); chooseLayer(Number(link.dataset.layer), true); }
  });
}
