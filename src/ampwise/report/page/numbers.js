// Unpack and format numbers, and classify a census by a format's limits. The same rules as census/algebra.py.

// The data of the page: gzip in base64.
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
  return new Response(stream).json();
}

const SUPERSCRIPTS = { '-': '⁻', 0: '⁰', 1: '¹', 2: '²', 3: '³', 4: '⁴', 5: '⁵', 6: '⁶', 7: '⁷', 8: '⁸', 9: '⁹' };
const power = (base, exponent) => base + [...String(exponent)].map((sign) => SUPERSCRIPTS[sign]).join('');

function short(value) {
  if (value === null || value === undefined) return '';
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(3)).toExponential().replace('e+', 'e');
  return Number.isInteger(value) ? value.toLocaleString('en-US') : String(Number(value.toPrecision(4)));
}

// A share that is not zero never reads as zero.
function percent(share) {
  if (!share) return '0';
  if (share < 0.001) return '<0.1%';
  if (share >= 1) return '100%';
  return share > 0.9994 ? '>99.9%' : (share * 100).toFixed(1) + '%';
}

const steps = (first, last) =>
  first === last ? 'step ' + first.toLocaleString('en-US') : `steps ${first.toLocaleString('en-US')} to ${last.toLocaleString('en-US')}`;

// --- How a format represents the values of a layer, times 2^k.

// Binade e holds magnitudes above 2^e and at most 2^(e+1).
function binadeOf(magnitude) {
  let exponent = Math.floor(Math.log2(magnitude));
  while (2 ** exponent >= magnitude) exponent -= 1;
  while (2 ** (exponent + 1) < magnitude) exponent += 1;
  return exponent;
}

const overflows = (magnitude, format, k) => {
  const scaled = magnitude * 2 ** k;
  return scaled > format.overflow || (scaled === format.overflow && format.overflow_at);
};

const countAt = (layer, exponent) => layer.counts[exponent - layer.lowest] || 0;

function countAtOrBelow(layer, limit, k) {
  if (limit === null) return 0;
  return layer.counts.reduce((sum, count, place) => sum + (layer.lowest + place + 1 + k <= limit ? count : 0), 0);
}

const nonzeros = (layer) => layer.counts.reduce((sum, count) => sum + count, 0);

function subnormal(layer, format, k) {
  if (format.flush === null) return [0, 0];
  const edge = format.lowest - k;
  const atEdge = countAt(layer, edge - 1);
  const reaches = layer.amax >= 2 ** edge;
  const certain = reaches ? Number(atEdge > 0 && layer.amin < 2 ** edge && binadeOf(layer.amin) === edge - 1) : atEdge;
  const inside = countAtOrBelow(layer, format.lowest - 1, k) - countAtOrBelow(layer, format.flush, k);
  return [inside + certain, inside + atEdge];
}

function overflowed(layer, format, k) {
  const limit = format.overflow_binade - k;
  const above = layer.counts.reduce((sum, count, place) => sum + (layer.lowest + place > limit ? count : 0), 0);
  const straddling = countAt(layer, limit);
  if (!straddling || !overflows(layer.amax, format, k)) return [above, above];
  if (overflows(layer.amin, format, k)) return [above + straddling, above + straddling];
  return [above + Number(binadeOf(layer.amax) === limit), above + straddling - Number(binadeOf(layer.amin) === limit)];
}

function fatesOf(layer, format, k) {
  const total = nonzeros(layer);
  const lost = countAtOrBelow(layer, format.flush, k);
  const under = subnormal(layer, format, k);
  const over = overflowed(layer, format, k);
  const normal = [total - lost - under[1] - over[1], total - lost - under[0] - over[0]];
  return { total, lost: [lost, lost], subnormal: under, normal, overflow: over };
}

// The fate of a whole binade, for its colour; if its values differ, that of most of them.
function fateOfBinade(exponent, format, k) {
  const scaled = exponent + k;
  if (scaled > format.overflow_binade) return 'overflow';
  if (format.flush !== null && scaled + 1 <= format.flush) return 'lost';
  return scaled + 1 <= format.lowest ? 'subnormal' : 'normal';
}

// The largest k at which no value of any layer overflows.
function largestThatFits(layers, format) {
  const amax = Math.max(...layers.map((layer) => layer.amax));
  if (!(amax > 0)) return 0;
  let k = format.overflow_binade - binadeOf(amax) + 1;
  while (overflows(amax, format, k)) k -= 1;
  return k;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
