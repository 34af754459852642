/** Whom a client trusts, and what it shows. */

import { readFileSync } from "node:fs";

import { LmkvError } from "./errors.js";

/** PEM files. */
export interface Tls {
  /** Issuers of the coordinators to trust. */
  ca: string;
  /** The certificate to show, and those between it and its issuer. */
  cert?: string;
  /** The certificate's private key. */
  key?: string;
}

/** What the files hold. Throws `CONFIG_ERROR` if one cannot be read, or the certificate or its key is missing. */
export function readTls(tls: Tls): { ca: Buffer; cert?: Buffer; key?: Buffer } {
  const ca = read("ca", tls.ca);
  if (tls.cert === undefined && tls.key === undefined) return { ca };
  for (const name of ["cert", "key"] as const) {
    if (tls[name] === undefined) {
      const message = `tls.${name} is missing: to show a certificate, set tls.cert and tls.key`;
      throw new LmkvError(message, "INTERNAL", "CONFIG_ERROR", { key: `tls.${name}` });
    }
  }
  return { ca, cert: read("cert", tls.cert ?? ""), key: read("key", tls.key ?? "") };
}

function read(name: string, path: string): Buffer {
  try {
    return readFileSync(path);
  } catch (error) {
    const message = `tls.${name}: cannot read ${path}: ${String(error)}`;
    throw new LmkvError(message, "INTERNAL", "CONFIG_ERROR", { key: `tls.${name}` });
  }
}
