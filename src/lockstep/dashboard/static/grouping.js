// Fewer groups: neighbours are joined, so that a chart has no more columns than can be seen, and a lasting difference stands out of noise.

// The groups that are shown, and one more on each side.
export function visible(groups, view, x) {
  if (!view.range) return groups;
  const [from, to] = view.range;
  const first = Math.max(0, groups.findIndex((group) => x(group) >= from) - 1);
  const after = groups.findIndex((group) => x(group) > to);
  return groups.slice(first, after < 0 ? groups.length : after + 1);
}

// At most `most` groups. Each column has about the same number of steps, so that columns are as wide as each other.
export function grouped(groups, most) {
  if (groups.length <= most) return groups;
  const [first, last] = [groups[0].s, groups[groups.length - 1].e];
  const width = Math.ceil((last - first + 1) / most);
  const found = new Map();
  for (const group of groups) {
    const key = Math.floor(group.e / width);
    if (found.has(key)) found.get(key).push(group); else found.set(key, [group]);
  }
  return [...found.values()].map((members) => (members.length === 1 ? members[0] : joined(members)));
}

function joined(groups) {
  const weights = groups.map((group) => group.e - group.s + 1);
  const mean = (pick) => {
    let [sum, total] = [0, 0];
    groups.forEach((group, at) => {
      const value = pick(group);
      if (value !== null && value !== undefined) [sum, total] = [sum + value * weights[at], total + weights[at]];
    });
    return total ? sum / total : null;
  };
  const all = (name) => [...new Set(groups.flatMap((group) => Object.keys(group[name])))];
  const time = mean((group) => group.d);
  const [first, last] = [groups[0], groups[groups.length - 1]];
  return {
    s: first.s, e: last.e, b: first.b, t: mean((group) => group.t), d: time, n: mean((group) => group.n),
    // Rates are means over time: all samples by all seconds.
    r: time ? mean((group) => (group.r ?? 0) * (group.d ?? 0)) / time : null, q: time ? 1 / time : null,
    ph: Object.fromEntries(all("ph").map((phase) => [phase, mean((group) => group.ph[phase] ?? 0)])),
    w: Object.fromEntries(all("w").map((id) => [id, [0, 1, 2].map((index) => {
      const value = mean((group) => group.w[id]?.[index]);
      return index === 1 ? Math.round(value) : value;
    })])),
  };
}

// A mean over neighbours, so that a trend is seen in noise, where there is noise; null if there is little.
export function trend(values, spread) {
  const sums = [0];
  const counts = [0];
  for (const value of values) {
    sums.push(sums[sums.length - 1] + (value ?? 0));
    counts.push(counts[counts.length - 1] + (value === null ? 0 : 1));
  }
  const half = Math.max(2, Math.round(values.length / 50));
  const means = values.map((value, at) => {
    const [from, to] = [at - Math.min(half, at), Math.min(at + Math.min(half, at), values.length - 1) + 1];
    const count = counts[to] - counts[from];
    return count ? (sums[to] - sums[from]) / count : null;
  });
  const noise = values.map((value, at) => (value === null ? 0 : Math.abs(value - means[at]))).sort((a, b) => a - b);
  return values.length > 40 && noise[noise.length >> 1] > 0.003 * spread ? means : null;
}
