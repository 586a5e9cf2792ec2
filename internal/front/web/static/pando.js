// What the page does beyond reading: it follows the service, acts on selections, and draws syncs. All of it works on
// what the server has rendered; without this file, the page can be read, and its forms work.
'use strict';

const trusted = window.trustedTypes
  ? trustedTypes.createPolicy('pando', { createHTML: (text) => text })
  : { createHTML: (text) => text };

// ---- Keeping the page up to date

// morph makes an element like another one, and keeps what the user has done to it: focus, selection, open details.
function morph(old, now) {
  if (old.nodeType !== now.nodeType || old.nodeName !== now.nodeName) {
    old.replaceWith(document.importNode(now, true));
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== now.data) old.data = now.data;
    return;
  }
  if (old.hasAttribute('data-keep') || old.isEqualNode(now)) return;

  for (const { name } of [...old.attributes]) {
    if (!now.hasAttribute(name) && name !== 'open' && name !== 'aria-selected') old.removeAttribute(name);
  }
  for (const { name, value } of now.attributes) {
    if (name !== 'checked' && old.getAttribute(name) !== value) {
      old.setAttribute(name, value);
      if (name === 'data-state') flash(old);
    }
  }
  morphChildren(old, now);
}

function morphChildren(old, now) {
  const names = new Set([...now.children].map((child) => child.id).filter(Boolean));
  const byName = new Map();
  for (const child of [...old.children]) {
    if (!child.id) continue;
    if (names.has(child.id)) byName.set(child.id, child);
    else child.remove();
  }

  let at = old.firstChild;
  for (const child of [...now.childNodes]) {
    const match = child.id ? byName.get(child.id) : null;
    if (match) {
      if (match === at) at = at.nextSibling;
      else old.insertBefore(match, at);
      morph(match, child);
    } else if (at && !child.id && !at.id && at.nodeName === child.nodeName) {
      const next = at.nextSibling;
      morph(at, child);
      at = next;
    } else {
      const added = old.insertBefore(document.importNode(child, true), at);
      if (old.hasAttribute('data-keyed') && added.nodeType === Node.ELEMENT_NODE) flash(added);
    }
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function flash(row) {
  row.classList.remove('fresh');
  requestAnimationFrame(() => row.classList.add('fresh'));
}

// refresh asks for this page again. Changes that come in the meantime are one more request, after a pause.
const pause = 250;
let refreshing = false;
let again = false;
async function refresh() {
  if (refreshing) {
    again = true;
    return;
  }
  refreshing = true;
  try {
    const answer = await fetch(location.href, { cache: 'no-store', headers: { Accept: 'text/html' } });
    if (answer.status === 401 || answer.status === 421) location.reload();
    if (answer.ok) {
      const now = new DOMParser().parseFromString(trusted.createHTML(await answer.text()), 'text/html');
      for (const old of document.querySelectorAll('[data-live]')) {
        const match = now.getElementById(old.id);
        if (match) morph(old, match);
      }
      document.dispatchEvent(new Event('refreshed'));
    }
  } catch {
    // The service is away: the stream says so, and asks again.
  }
  setTimeout(() => {
    refreshing = false;
    if (again) {
      again = false;
      refresh();
    }
  }, pause);
}

// follow opens a stream of events while the page is visible, so that hidden tabs use no connections.
function follow(url, open) {
  let source = null;
  const update = () => {
    if (document.hidden) {
      source?.close();
      source = null;
    } else if (!source) {
      source = new EventSource(url);
      open(source);
    }
  };
  document.addEventListener('visibilitychange', update);
  update();
}

class Live extends HTMLElement {
  connectedCallback() {
    let opened = 0;
    follow('/live', (source) => {
      source.onopen = () => {
        this.say('on', 'live');
        if (opened++ > 0) refresh(); // what happened while it was closed
      };
      source.onerror = () => {
        this.say('off', 'not connected');
        if (source.readyState === EventSource.CLOSED) refresh(); // the session may have ended
      };
      source.addEventListener('change', refresh);
      source.addEventListener('end', () => location.reload());
    });
    setInterval(tellAges, 5000);
  }

  say(state, text) {
    this.dataset.state = state;
    this.querySelector('.live-text').textContent = text;
  }
}

// tellAges brings relative times up to date, in the words of the server.
function tellAges() {
  for (const time of document.querySelectorAll('time[datetime]')) {
    const ms = Date.now() - Date.parse(time.dateTime);
    const text = ms < 0 ? 'in ' + span(-ms) : ms < 1000 ? 'now' : span(ms) + ' ago';
    if (time.textContent !== text && !Number.isNaN(ms)) time.textContent = text;
  }
}

function span(ms) {
  const s = Math.floor(ms / 1000);
  if (s < 120) return s + ' s';
  if (s < 7200) return Math.floor(s / 60) + ' min';
  if (s < 48 * 3600) return Math.floor(s / 3600) + ' h';
  return Math.floor(s / 86400) + ' days';
}

// ---- Selections

// unmet says why an action is not possible, by what it needs of a row.
const needs = {
  mounted: { of: (row) => row.dataset.state === 'mounted', unmet: 'none of them is mounted' },
  idle: { of: (row) => row.dataset.state === 'idle', unmet: 'all of them are mounted' },
  pinned: { of: (row) => 'pinned' in row.dataset, unmet: 'none of them is pinned' },
  unpinned: { of: (row) => !('pinned' in row.dataset), unmet: 'all of them are pinned' },
};

const mostInAddress = 300; // names of selected volumes

class Selection extends HTMLElement {
  connectedCallback() {
    this.all = this.querySelector('.all');
    this.all.disabled = false;
    this.status = this.querySelector('.chosen');
    this.addEventListener('change', (e) => {
      if (e.target === this.all) for (const box of this.boxes()) box.checked = this.all.checked;
      this.last = e.target;
      this.update();
    });
    this.addEventListener('click', (e) => this.selectRange(e));
    this.addEventListener('click', (e) => {
      const button = e.target.closest('button[aria-disabled="true"]');
      if (button) e.preventDefault();
    });
    document.addEventListener('refreshed', () => this.update());
    this.update();
  }

  boxes() {
    return [...this.querySelectorAll('tbody input[name=ref]')];
  }

  selectRange(e) {
    const boxes = this.boxes();
    const [from, to] = [boxes.indexOf(this.last), boxes.indexOf(e.target)].sort((a, b) => a - b);
    if (!e.shiftKey || from < 0 || e.target === this.last) return;
    for (const box of boxes.slice(from, to + 1)) box.checked = e.target.checked;
  }

  update() {
    const boxes = this.boxes();
    const chosen = boxes.filter((box) => box.checked);
    const rows = chosen.map((box) => box.closest('tr'));
    this.all.checked = chosen.length > 0 && chosen.length === boxes.length;
    this.all.indeterminate = chosen.length > 0 && chosen.length < boxes.length;

    const own = rows.filter((row) => !('foreign' in row.dataset));
    const reasons = [];
    for (const button of this.querySelectorAll('.bulk button')) {
      let why = '';
      if (rows.length === 0) why = 'select volumes first';
      else if (own.length === 0) why = 'they belong to somebody else';
      else if (button.dataset.needs && !own.some(needs[button.dataset.needs].of)) why = needs[button.dataset.needs].unmet;
      button.setAttribute('aria-disabled', why ? 'true' : 'false');
      button.title = why;
      if (why && rows.length > 0) reasons.push(button.textContent.replace('…', '') + ': ' + why);
    }
    const count = chosen.length === 1 ? '1 volume selected' : chosen.length + ' volumes selected';
    this.status.textContent = rows.length ? [count, ...reasons].join('. ') + '.' : 'Select volumes to act on them.';

    const url = new URL(location.href);
    url.searchParams.delete('select');
    if (chosen.length && chosen.length <= mostInAddress) {
      url.searchParams.set('select', chosen.map((box) => box.value).join(','));
    }
    if (url.href !== location.href) history.replaceState(null, '', url);
  }
}

// ---- Keys

function move(by) {
  const links = [...document.querySelectorAll('tbody td.name a:not(.toggle)')];
  if (!links.length) return;
  const row = document.activeElement.closest?.('tr');
  const at = links.findIndex((link) => row && row.contains(link));
  links[Math.min(Math.max(at + by, 0), links.length - 1)].focus();
}

document.addEventListener('keydown', (e) => {
  const typing = e.target.closest('input:not([type=checkbox]), select, textarea');
  if (typing && e.key === 'Escape') typing.blur();
  if (typing || e.ctrlKey || e.metaKey || e.altKey) return;
  const keys = {
    '/': () => document.querySelector('[data-focus]')?.focus(),
    j: () => move(1),
    k: () => move(-1),
    n: () => document.querySelector('a[rel=next]')?.click(),
    x: () => document.activeElement.closest?.('tr')?.querySelector('input[name=ref]')?.click(),
  };
  if (keys[e.key]) {
    keys[e.key]();
    e.preventDefault();
  }
});

// ---- Syncs of a volume

const samplesShown = 120;
const [fastest, slowest] = [1e-5, 10]; // seconds, of the scale
const marks = [[1e-4, '100 µs'], [1e-3, '1 ms'], [1e-2, '10 ms'], [0.1, '100 ms'], [1, '1 s']];

function svg(name, attributes, ...children) {
  const el = document.createElementNS('http://www.w3.org/2000/svg', name);
  for (const [key, value] of Object.entries(attributes)) el.setAttribute(key, value);
  el.append(...children);
  return el;
}

function height(seconds) {
  const part = Math.log(Math.max(seconds, fastest) / fastest) / Math.log(slowest / fastest);
  return 200 * (1 - Math.min(part, 1));
}

function duration(seconds) {
  if (seconds == null) return '–';
  if (seconds < 1e-3) return Math.round(seconds * 1e6) + ' µs';
  if (seconds < 1) return (seconds * 1e3).toPrecision(3) + ' ms';
  return seconds.toPrecision(3) + ' s';
}

function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  for (; n >= 1023.95 && i < units.length - 1; i++) n /= 1024;
  return (i ? n.toFixed(1) : Math.round(n)) + ' ' + units[i];
}

class Syncs extends HTMLElement {
  connectedCallback() {
    this.samples = [];
    this.lines = {};
    const chart = svg('svg', { viewBox: '0 0 1000 200', preserveAspectRatio: 'none', role: 'img',
      'aria-label': 'Duration of syncs in the last two minutes; the figures are below' });
    const plot = document.createElement('div');
    plot.className = 'plot syncs';
    for (const [seconds, text] of marks) {
      chart.append(svg('line', { class: 'rule', x1: 0, x2: 1000, y1: height(seconds), y2: height(seconds),
        'vector-effect': 'non-scaling-stroke' }));
      plot.append(svg('svg', { class: 'mark', width: '100%', height: '100%', 'aria-hidden': 'true' },
        svg('text', { x: 4, y: (height(seconds) / 2).toFixed(1) + '%', dy: -3 }, text)));
    }
    for (const name of ['max', 'p99', 'p50']) {
      this.lines[name] = svg('path', { class: name, 'vector-effect': 'non-scaling-stroke' });
      chart.append(this.lines[name]);
    }
    plot.prepend(chart);
    this.figures = document.createElement('p');
    this.figures.className = 'figures';
    this.figures.textContent = 'measuring…';
    this.missing = document.createElement('p');
    this.missing.className = 'legend';
    const legend = document.createElement('p');
    legend.className = 'legend';
    for (const name of ['p50', 'p99', 'max']) {
      const key = document.createElement('span');
      key.className = 'key ' + name;
      legend.append(key, name + ' ');
    }
    this.replaceChildren(plot, this.figures, legend, this.missing);

    follow(this.dataset.src, (source) => {
      source.addEventListener('sample', (e) => this.add(JSON.parse(e.data)));
      source.addEventListener('error', (e) => {
        if (e.data) {
          this.figures.textContent = JSON.parse(e.data).detail;
          source.close();
        }
      });
    });
  }

  add(sample) {
    this.samples.push(sample);
    this.samples.splice(0, this.samples.length - samplesShown);
    for (const [name, line] of Object.entries(this.lines)) line.setAttribute('d', this.path(name));
    this.figures.textContent = this.words(sample);
    this.missing.textContent = (sample.missing ?? []).join('. ');
  }

  // path is the line of a percentile: intervals without syncs are gaps.
  path(name) {
    let d = '';
    let gap = true;
    this.samples.forEach((sample, i) => {
      const value = sample.syncs?.latency_seconds?.[name];
      const x = 1000 * (samplesShown - this.samples.length + i + 1) / samplesShown;
      if (value == null) {
        gap = true;
        return;
      }
      if (gap) d += `M${(x - 1000 / samplesShown).toFixed(1)} ${height(value).toFixed(1)}`;
      d += `L${x.toFixed(1)} ${height(value).toFixed(1)}`;
      gap = false;
    });
    return d;
  }

  words(sample) {
    if (!sample.mounted) return 'It is not mounted.';
    const parts = [];
    const rate = (n) => (n / sample.seconds < 10 ? (n / sample.seconds).toFixed(1) : Math.round(n / sample.seconds));
    const latency = sample.syncs?.latency_seconds;
    if (sample.syncs) parts.push(rate(sample.syncs.count) + ' syncs/s');
    if (latency) parts.push('p50 ' + duration(latency.p50 ?? latency.mean), 'p99 ' + duration(latency.p99), 'max ' + duration(latency.max));
    if (sample.written_bytes != null) parts.push(bytes(sample.written_bytes / sample.seconds) + '/s written');
    return parts.join(' · ') || 'Nothing is known of its syncs.';
  }
}

customElements.define('pando-live', Live);
customElements.define('pando-selection', Selection);
customElements.define('pando-syncs', Syncs);
