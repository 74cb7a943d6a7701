'use strict';
(() => {
  const SVG = 'http://www.w3.org/2000/svg';
  const root = document.documentElement;
  const make = (tag, text, title) => {
    const node = document.createElement(tag);
    if (text) node.textContent = text;
    if (title) node.setAttribute('aria-label', title), node.title = title;
    return node;
  };
  const dark = () => root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme:dark)').matches;

  const theme = make('button', '', 'Light or dark');
  const show = () => theme.textContent = dark() ? '\u2600 Light' : '\u263e Dark';
  theme.type = 'button';
  theme.onclick = () => (root.dataset.theme = dark() ? 'light' : 'dark', show());
  show();
  document.querySelector('.top>div').append(theme);
  // Paper is white.
  let before;
  addEventListener('beforeprint', () => (before = root.dataset.theme, root.dataset.theme = 'light'));
  addEventListener('afterprint', () => before ? root.dataset.theme = before : delete root.dataset.theme);

  // A drawing as a file: title and legend above it, the styles inside.
  const file = (figure, forced) => {
    const drawing = figure.querySelector('svg'), [, , wide, tall] = drawing.getAttribute('viewBox').split(' ').map(Number);
    const legend = [...figure.querySelectorAll('.legend li')], above = 30 + 16 * legend.length;
    const add = (parent, tag, attributes, text) => {
      const node = document.createElementNS(SVG, tag);
      for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
      if (text) node.textContent = text;
      return parent.appendChild(node);
    };
    const svg = document.createElementNS(SVG, 'svg'), [width, height] = [wide + 24, tall + above + 16];
    svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    svg.setAttribute('width', width);
    svg.setAttribute('height', height);
    if (forced) svg.dataset.theme = dark() ? 'dark' : 'light';
    add(svg, 'style', {}, document.getElementById('drawing-style').textContent);
    add(svg, 'rect', {width: '100%', height: '100%', style: 'fill:var(--card)'});
    add(svg, 'text', {x: 12, y: 22, class: 'head'}, figure.querySelector('figcaption').textContent);
    legend.forEach((item, place) => {
      const row = add(svg, 'g', {style: item.getAttribute('style'), transform: `translate(12 ${30 + 16 * place})`});
      add(row, 'rect', {class: 'dot', y: 6, width: 14, height: 4});
      add(row, 'text', {x: 20, y: 12}, item.textContent);
    });
    const inner = add(svg, 'g', {transform: `translate(12 ${above})`});
    for (const child of drawing.childNodes) inner.append(child.cloneNode(true));
    inner.querySelectorAll('.picked').forEach(node => node.classList.remove('picked'));
    return {text: new XMLSerializer().serializeToString(svg), width, height};
  };
  const save = (blob, figure, ending) => {
    const link = make('a');
    link.href = URL.createObjectURL(blob);
    link.download = figure.dataset.file + ending;
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const saveSvg = figure => save(new Blob([file(figure, false).text], {type: 'image/svg+xml'}), figure, '.svg');
  const savePng = figure => {
    const {text, width, height} = file(figure, true), image = new Image(), url = URL.createObjectURL(new Blob([text], {type: 'image/svg+xml'}));
    image.onload = () => {
      const canvas = make('canvas'), factor = 2;
      [canvas.width, canvas.height] = [width * factor, height * factor];
      canvas.getContext('2d').drawImage(image, 0, 0, canvas.width, canvas.height);
      URL.revokeObjectURL(url);
      canvas.toBlob(blob => save(blob, figure, '.png'), 'image/png');
    };
    image.src = url;
  };

  const tip = make('div'), said = make('div');
  tip.className = 'tip';
  tip.hidden = true;
  said.className = 'aside';
  said.setAttribute('aria-live', 'polite');
  document.body.append(tip, said);
  const tell = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(6, Math.min(x + 14, innerWidth - box.width - 6)) + 'px';
    tip.style.top = (y - box.height - 12 < 6 ? y + 16 : y - box.height - 12) + 'px';
  };
  const hide = () => tip.hidden = true;

  for (const figure of document.querySelectorAll('figure')) {
    const title = figure.querySelector('figcaption').textContent, bar = make('div'), svg = figure.querySelector('svg');
    bar.className = 'save';
    for (const [name, run] of [['SVG', saveSvg], ['PNG', savePng]]) {
      const button = make('button', name, `Save \u201c${title}\u201d as ${name}`);
      button.type = 'button';
      button.onclick = () => run(figure);
      bar.append(button);
    }
    figure.append(bar);

    // What can be pointed at: marks with a title, or the cells of a heat map.
    const cells = figure.querySelector('script') && JSON.parse(figure.querySelector('script').textContent);
    const groups = cells ? [] : [...svg.querySelectorAll('g')]
      .map(group => [...group.children].filter(mark => mark.querySelector(':scope>title'))).filter(group => group.length);
    if (!cells && !groups.length) continue;
    const texts = new Map();
    for (const mark of groups.flat()) {
      texts.set(mark, mark.querySelector('title').textContent);
      mark.querySelector('title').remove();
    }
    const number = value => value === null ? 'nothing' : value.toLocaleString('en', {maximumSignificantDigits: 3});
    const cell = (row, column) => `${cells.rows[row]}\n${number(cells.from + column * cells.step)} to ${number(cells.from + (column + 1) * cells.step)} ${cells.x}\n${cells.unit}: ${number(cells.values[row][column])}`;
    let [row, column, picked] = [0, 0, null];
    const scale = () => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    const pick = silent => {
      picked?.classList.remove('picked');
      const box = svg.getBoundingClientRect();
      let text, x, y;
      if (cells) {
        text = cell(row, column);
        x = box.left + (cells.left + (column + .5) * cells.width) * scale();
        y = box.top + (cells.top + row * cells.height) * scale();
      } else {
        picked = groups[row][column];
        picked.classList.add('picked');
        text = texts.get(picked);
        const at = picked.getBoundingClientRect();
        [x, y] = [at.left + at.width / 2, at.top + at.height / 2];
      }
      tell(text, x, y);
      if (!silent) said.textContent = text;
    };
    const leave = () => (picked?.classList.remove('picked'), picked = null, hide());
    svg.tabIndex = 0;
    svg.setAttribute('aria-keyshortcuts', 'ArrowLeft ArrowRight ArrowUp ArrowDown');
    svg.onkeydown = event => {
      const move = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0], Home: [0, -1e9], End: [0, 1e9]}[event.key];
      if (event.key === 'Escape') return leave();
      if (!move) return;
      event.preventDefault();
      const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
      if (!tip.hidden) [row, column] = [row + move[0], column + move[1]];
      row = clamp(row, cells ? cells.values.length : groups.length);
      column = clamp(column, cells ? cells.values[row].length : groups[row].length);
      pick(false);
    };
    svg.onblur = leave;
    svg.onpointerleave = leave;
    svg.onpointermove = event => {
      const box = svg.getBoundingClientRect(), [x, y] = [(event.clientX - box.left) / scale(), (event.clientY - box.top) / scale()];
      if (cells) {
        [row, column] = [Math.floor((y - cells.top) / cells.height), Math.floor((x - cells.left) / cells.width)];
        if (cells.values[row]?.[column] === undefined) return hide(), [row, column] = [0, 0];
        return tell(cell(row, column), event.clientX, event.clientY);
      }
      let best = 30 ** 2;
      let found = null;
      groups.forEach((group, r) => group.forEach((mark, c) => {
        const b = mark.getBBox(), dx = Math.max(b.x - x, 0, x - b.x - b.width), dy = Math.max(b.y - y, 0, y - b.y - b.height);
        const cx = b.x + b.width / 2 - x, cy = b.y + b.height / 2 - y;
        const far = dx * dx + dy * dy + (cx * cx + cy * cy) / 1e6;
        if (far < best) [best, found] = [far, [r, c]];
      }));
      if (!found) return leave();
      [row, column] = found;
      pick(true);
    };
  }

  for (const table of document.querySelectorAll('main>section>.wide>table')) {
    const body = table.tBodies[0];
    if (body.rows.length < 4) continue;
    [...table.tHead.rows[0].cells].forEach((head, place) => {
      if (!head.textContent) return;
      const button = make('button', head.textContent);
      button.type = 'button';
      head.replaceChildren(button);
      button.onclick = () => {
        const down = head.getAttribute('aria-sort') !== 'descending';
        for (const other of table.tHead.rows[0].cells) other.removeAttribute('aria-sort');
        head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
        const value = row => { const text = row.cells[place].textContent, n = parseFloat(text.replace(/,/g, '')); return isNaN(n) ? text : n; };
        const order = (a, b) => typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === 'number' ? -1 : 1;
        body.append(...[...body.rows].sort((a, b) => order(value(a), value(b)) * (down ? -1 : 1)));
      };
    });
  }
})();
