// Formats numbers and times.

const integer = new Intl.NumberFormat("en");
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** `1,234`. */
export const count = (value) => integer.format(value);

/** `1 chunk`, `2 chunks`. */
export const counted = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** `3.2 GiB`. */
export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

/** `3.2 of 8.0 GiB`. */
export function bytesOf(used, capacity) {
  const [part, whole] = [bytes(used), bytes(capacity)];
  const [number, unit] = part.split(" ");
  return `${whole.endsWith(` ${unit}`) ? number : part} of ${whole}`;
}

/** `83 %`; 100 % only if nothing is missing. */
export const percent = (part, whole) => `${whole ? Math.floor((100 * part) / whole) : 0} %`;

/** `40 ms`, `1.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`. */
export function duration(seconds) {
  if (seconds < 0.9995) return `${Math.max(0, Math.round(1000 * seconds))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return two(whole, 60, "min", 1, "s");
  if (whole < 86400) return two(whole, 3600, "h", 60, "min");
  return two(whole, 86400, "d", 3600, "h");
}

function two(seconds, large, largeName, small, smallName) {
  const rest = Math.floor((seconds % large) / small);
  return `${Math.floor(seconds / large)} ${largeName}${rest ? ` ${rest} ${smallName}` : ""}`;
}

/** `just now`, `12 s ago`; coarse, so that it does not flicker. */
export function ago(seconds) {
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds / 5) * 5} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  return `${Math.floor(seconds / 86400)} d ago`;
}
