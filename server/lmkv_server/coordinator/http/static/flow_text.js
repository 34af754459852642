// Words for transfers, shared by the ring, the heat map and the list.

import { bytes, counted } from "./format.js";

const LABEL_LENGTH = 15;

/** `a → b: 9 chunks, 9.0 MiB`. */
export function flowText({ from, to, chunks, bytes: size, isRunning }) {
  const fetched = chunks ? `${counted(chunks, "chunk")}, ${bytes(size)}` : "not counted yet";
  return `${from} → ${to}: ${fetched}${isRunning ? ", a move or copy is under way" : ""}`;
}

/** A name that fits beside its mark. The end stays: it distinguishes the instances of a fleet. */
export const shortened = (name) => (name.length > LABEL_LENGTH ? `…${name.slice(1 - LABEL_LENGTH)}` : name);
