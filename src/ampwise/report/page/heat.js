// The heat map: layers from top to bottom, steps from left to right.

// Cells are integers: shares in millionths, sizes as logarithms; the map has their units.
const shareOf = (cell) => cell / heat.map.per_million;
const sizeOf = (cell) => 2 ** (cell / heat.map.per_power);
const WHATS = [
  { name: 'lost', ramp: 'heat', value: (cell) => Math.sqrt(shareOf(cell)), text: (cell) => percent(shareOf(cell)) },
  { name: 'norm', title: 'norm of the gradients', ramp: 'size', text: (cell) => rough(sizeOf(cell)) },
  { name: 'largest', title: 'largest gradient', ramp: 'size', text: (cell) => rough(sizeOf(cell)) },
];
const rough = (value) => short(Number(value.toPrecision(3)));
const heat = { maps: [], layers: [], map: null, what: WHATS[0], row: 0, column: 0, from: 0, to: 1 };
const LABELS = 220; // pixels for names, if rows are high enough
const FOOT = 18; // pixels for step numbers

const lostTitle = (map) => (map.was_fp16 ? 'share lost in FP16' : 'share FP16 would lose without a loss scale');
const NEGLIGIBLE = 0.001;
const lossless = (map) => map.lost.every((row) => row.every((cell) => !(cell >= NEGLIGIBLE * map.per_million)));
const titleOf = (what, map) => what.title || lostTitle(map);

// The range of a quantity without fixed limits.
function span(cells) {
  let low = Infinity, high = -Infinity;
  for (const row of cells) for (const cell of row) if (typeof cell === 'number') { low = Math.min(low, cell); high = Math.max(high, cell); }
  return low <= high ? [low, high] : [0, 1];
}

function shades(ramp) {
  const stops = [0, 1, 2, 3].map((at) => rgb(colour(`--${ramp}${at}`)));
  return Array.from({ length: 256 }, (_, at) => {
    const place = (at / 255) * 3, left = Math.min(2, Math.floor(place));
    const mixed = stops[left].map((part, channel) => Math.round(part + (stops[left + 1][channel] - part) * (place - left)));
    return `rgb(${mixed.join(' ')})`;
  });
}

function rgb(text) {
  const hex = text.replace('#', '');
  const long = hex.length === 3 ? [...hex].map((digit) => digit + digit).join('') : hex;
  return [0, 2, 4].map((at) => parseInt(long.slice(at, at + 2), 16));
}

// The visible columns and where each begins; a column extends to the next.
function columnsInSight(map) {
  const places = map.first.map((first, at) => ({ at, start: first, stop: at + 1 < map.first.length ? map.first[at + 1] : map.last[at] + Math.max(1, (map.last[at] - map.first[0]) / Math.max(1, map.first.length - 1)) }));
  return places.filter(({ start, stop }) => stop > heat.from && start <= heat.to);
}

function geometry() {
  const canvas = one('#heat-map'), rows = heat.map.rows.length;
  const width = Math.max(canvas.parentElement.clientWidth, 240);
  const tall = Math.min(16, Math.max(2, Math.floor((rows > 40 ? 480 : 560) / rows)));
  const left = tall >= 11 ? Math.min(LABELS, Math.floor(width * 0.42)) : 0;
  return { canvas, rows, width, tall, left, height: rows * tall + FOOT };
}

function drawHeat() {
  if (!heat.map) return;
  const { canvas, width, tall, left, height } = geometry();
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext('2d');
  pen.scale(devicePixelRatio, devicePixelRatio);
  pen.fillStyle = colour('--absent');
  pen.fillRect(0, 0, width, height);
  const columns = columnsInSight(heat.map), x = placed(left, width);
  const paint = painter();
  heat.map.rows.forEach((layer, row) => {
    for (const { at, start, stop } of columns) {
      const shade = paint(heat.map[heat.what.name][row][at]);
      if (!shade) continue;
      // On whole pixels, so that no background shows between two columns.
      const from = Math.floor(Math.max(left, x(start))), to = Math.ceil(Math.min(width, x(stop)));
      pen.fillStyle = shade;
      pen.fillRect(from, row * tall, Math.max(1, to - from), tall - (tall > 6 ? 1 : 0));
    }
  });
  if (left) nameRows(pen, tall, left);
  numberSteps(pen, x, left, width, height);
  frameCell(pen, x, tall, left, width);
}

const placed = (left, width) => (step) => left + ((step - heat.from) / Math.max(1e-9, heat.to - heat.from + 1)) * (width - left);

function painter() {
  const table = shades(heat.what.ramp);
  const [low, high] = heat.what.value ? [0, 1] : span(heat.map[heat.what.name]);
  const special = { zero: colour('--dead'), bad: colour('--broken') };
  return (cell) => {
    if (typeof cell !== 'number') return special[cell];
    const share = heat.what.value ? heat.what.value(cell) : (cell - low) / Math.max(1e-9, high - low);
    return table[Math.round(255 * Math.min(1, Math.max(0, share)))];
  };
}

function nameRows(pen, tall, left) {
  pen.font = '11px ui-monospace, Menlo, Consolas, monospace';
  pen.textBaseline = 'middle';
  heat.map.rows.forEach((layer, row) => {
    pen.fillStyle = colour(row === heat.row ? '--ink' : '--soft');
    pen.fillText(fitted(pen, heat.layers[layer].name, left - 8), 0, row * tall + tall / 2);
  });
}

function numberSteps(pen, x, left, width, height) {
  pen.font = '11px system-ui, sans-serif';
  pen.textBaseline = 'alphabetic';
  pen.fillStyle = colour('--soft');
  const apart = 90, marks = Math.max(2, Math.floor((width - left) / apart));
  const stride = Math.max(1, Math.ceil((heat.to - heat.from) / marks));
  const round = [1, 2, 5].map((digit) => digit * 10 ** Math.floor(Math.log10(stride))).find((each) => each >= stride) || 10 ** Math.ceil(Math.log10(stride));
  for (let step = Math.ceil(heat.from / round) * round; step <= heat.to; step += round) {
    const text = step.toLocaleString('en-US'), at = x(step + 0.5);
    pen.fillText(text, Math.min(at - pen.measureText(text).width / 2, width - pen.measureText(text).width), height - 4);
  }
}

// A long name, shortened: first its usual ends, then in the middle.
function fitted(pen, whole, width) {
  if (pen.measureText(whole).width <= width) return whole;
  const name = whole.replace(/\.weight$/, '.w').replace(/\.bias$/, '.b');
  if (pen.measureText(name).width <= width) return name;
  let kept = name.length - 1;
  const cut = () => name.slice(0, Math.floor(kept / 2)) + '…' + name.slice(name.length - Math.ceil(kept / 2));
  while (kept > 2 && pen.measureText(cut()).width > width) kept -= 1;
  return cut();
}

function frameCell(pen, x, tall, left, width) {
  const column = columnsInSight(heat.map).find(({ at }) => at === heat.column);
  if (document.activeElement !== one('#heat-map') || !column) return;
  pen.strokeStyle = colour('--accent');
  pen.lineWidth = 2;
  const from = Math.max(left, x(column.start));
  pen.strokeRect(from, heat.row * tall, Math.max(3, Math.min(width, x(column.stop)) - from), tall);
}

// A cell as text.
function cellWords(row, column) {
  const map = heat.map, layer = heat.layers[map.rows[row]];
  const cell = map.lost[row][column], low = map.lost_low ? map.lost_low[row][column] : cell;
  const when = steps(map.first[column], map.last[column]);
  const scale = map.exponent[column] === null ? '' : `, loss scale ${[...new Set([map.exponent[column], map.exponent_high[column]])].map((exponent) => power(2, exponent)).join(' to ')}`;
  if (cell === null) return `${layer.name}, ${when}${scale}: no gradient`;
  if (cell === 'bad') return `${layer.name}, ${when}${scale}: inf or NaN`;
  if (cell === 'zero') return `${layer.name}, ${when}${scale}: all zeros`;
  const range = typeof low === 'number' ? [...new Set([percent(shareOf(low)), percent(shareOf(cell))])].join(' to ') : percent(shareOf(cell));
  const size = (what) => (typeof map[what][row][column] === 'number' ? rough(sizeOf(map[what][row][column])) : 'not known');
  return `${layer.name}, ${when}${scale}: ${lostTitle(map)} ${range}; norm ${size('norm')}, largest ${size('largest')}`;
}

function cellAt(event) {
  const { canvas, rows, width, tall, left } = geometry();
  const box = canvas.getBoundingClientRect();
  const across = ((event.clientX - box.left) / box.width) * width;
  const row = Math.floor((event.clientY - box.top) / tall);
  if (across < left) return row >= 0 && row < rows ? { row, column: null } : null;
  const x = placed(left, width);
  const column = columnsInSight(heat.map).find(({ start, stop }) => x(start) <= across && across < x(stop));
  return column && row >= 0 && row < rows ? { row, column: column.at } : null;
}

function showTip(event, words) {
  const tip = one('#tip');
  tip.hidden = !words;
  if (!words) return;
  tip.textContent = words;
  tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
  tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
}

function moveCell(event) {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.key === 'Enter') return chooseLayer(heat.map.rows[heat.row], true);
  if (!(event.key in moves)) return undefined;
  event.preventDefault();
  const [down, right] = moves[event.key];
  heat.row = Math.min(heat.map.rows.length - 1, Math.max(0, heat.row + down));
  heat.column = Math.min(heat.map.first.length - 1, Math.max(0, heat.column + right));
  one('#heat-cell').textContent = cellWords(heat.row, heat.column);
  keepRowInSight();
  return drawHeat();
}

function keepRowInSight() {
  const { canvas, tall } = geometry(), box = canvas.parentElement;
  box.scrollTop = Math.min(heat.row * tall, Math.max(box.scrollTop, (heat.row + 1) * tall + FOOT - box.clientHeight));
}

function heatLegend() {
  const legend = one('#heat-legend'), map = heat.map;
  const [low, high] = heat.what.value ? [0, map.per_million] : span(map[heat.what.name]);
  const middle = heat.what.value ? high / 4 : (low + high) / 2; // shares are drawn by their square root
  const stops = [0, 1, 2, 3].map((at) => `var(--${heat.what.ramp}${at})`);
  const ramp = (colours) => { const bar = made('span', '', { class: 'ramp' }); bar.style.background = `linear-gradient(to right, ${colours})`; return bar; };
  const half = `color-mix(in srgb, ${stops[1]}, ${stops[2]})`;
  legend.replaceChildren(heat.what.text(low), ramp([stops[0], `${stops[1]} 67%`, half]), heat.what.text(middle), ramp([half, `${stops[2]} 33%`, stops[3]]), heat.what.text(high));
  const cells = map[heat.what.name].flat();
  const extra = [['zero', 'all zeros', '--dead'], ['bad', 'inf or NaN', '--broken']].filter(([kind]) => cells.includes(kind));
  for (const [, words, shade] of extra) {
    const swatch = made('span', '', { class: 'swatch' });
    swatch.style.background = `var(${shade})`;
    legend.append(document.createTextNode(' · '), swatch, document.createTextNode(words));
  }
  const number = (count, what) => `${count.toLocaleString('en-US')} ${what}${count === 1 ? '' : 's'}`;
  const left = heat.left ? `, the worst ones (${heat.left.toLocaleString('en-US')} more do not fit),` : '';
  const merged = map.merged ? '; merged steps show the largest' : '; each extends to the next';
  one('#heat-about').textContent = `${number(map.rows.length, 'layer')}${left} in the order of the model, ${number(map.steps, 'sampled step')}${merged}${map.was_fp16 && lossless(map) ? '; FP16 lost almost nothing' : ''}`;
}

function fillHeatChoices() {
  const what = one('#heat-what'), whose = one('#heat-whose');
  what.replaceChildren(...WHATS.map((each) => made('option', titleOf(each, heat.map), { value: each.name })));
  what.value = heat.what.name;
  whose.replaceChildren(...heat.maps.map((map, at) => made('option', map.name, { value: at })));
  whose.value = heat.maps.indexOf(heat.map);
  one('#heat-whose-label').hidden = heat.maps.length < 2;
}

function setHeat(data) {
  const before = heat.maps.indexOf(heat.map);
  Object.assign(heat, { maps: data.heat, layers: data.layers, left: data.layers_left, map: data.heat[Math.max(0, before)] || null });
  one('#heat').hidden = !heat.map;
  if (!heat.map) return;
  // For a run that loses nothing, the size of gradients is more informative.
  if (before < 0) heat.what = lossless(heat.map) ? WHATS[1] : WHATS[0];
  showMap();
}

function showMap() {
  heat.row = Math.min(heat.row, heat.map.rows.length - 1);
  heat.column = Math.min(heat.column, heat.map.first.length - 1);
  if (one('#heat-cell').textContent) one('#heat-cell').textContent = cellWords(heat.row, heat.column);
  fillHeatChoices();
  heatLegend();
  drawHeat();
}

function startHeat() {
  const canvas = one('#heat-map');
  one('#heat-what').addEventListener('change', (event) => { heat.what = WHATS.find((each) => each.name === event.target.value); heatLegend(); drawHeat(); });
  one('#heat-whose').addEventListener('change', (event) => { heat.map = heat.maps[event.target.value]; showMap(); });
  canvas.addEventListener('mousemove', (event) => {
    const cell = cellAt(event);
    showTip(event, cell && (cell.column === null ? heat.layers[heat.map.rows[cell.row]].name : cellWords(cell.row, cell.column)));
  });
  canvas.addEventListener('mouseleave', (event) => showTip(event, ''));
  canvas.addEventListener('click', (event) => {
    const cell = cellAt(event);
    if (!cell) return;
    heat.row = cell.row;
    if (cell.column !== null) { heat.column = cell.column; one('#heat-cell').textContent = cellWords(cell.row, cell.column); }
    chooseLayer(heat.map.rows[cell.row], false);
  });
  canvas.addEventListener('keydown', moveCell);
  for (const event of ['focus', 'blur']) canvas.addEventListener(event, drawHeat);
  new ResizeObserver(drawHeat).observe(canvas.parentElement);
  charts.listeners.push((from, to) => { Object.assign(heat, { from, to }); drawHeat(); });
}
