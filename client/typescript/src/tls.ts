/** Whom a client trusts, and what it shows. */

import { readFileSync } from "node:fs";
import { isIP } from "node:net";
import { connect, createSecureContext, type SecureContext, type TLSSocket } from "node:tls";

import { LmkvError } from "./errors.js";

/** PEM files. Those that are replaced count from the next connection on. */
export interface Tls {
  /** Issuers of the coordinators to trust. */
  ca: string;
  /** The certificate to show, and those between it and its issuer. */
  cert?: string;
  /** The certificate's private key. */
  key?: string;
}

/** Opens connections with what the files hold by then. */
export class TlsConnector {
  private context: SecureContext;

  /** Throws `CONFIG_ERROR` if a file cannot be read, or the certificate or its key is missing, or they are no pair. */
  constructor(private readonly tls: Tls) {
    this.context = readContext(tls);
  }

  /** A connection that will speak HTTP/2 over TLS. Files that make no sense, or not yet, leave the last in place. */
  connect(authority: URL): TLSSocket {
    try {
      this.context = readContext(this.tls);
    } catch (error) {
      if (!(error instanceof LmkvError)) throw error;
    }
    const host = authority.hostname.replace(/^\[|\]$/g, "");
    return connect({
      host,
      port: Number(authority.port || 443),
      ...(isIP(host) ? {} : { servername: host }),
      ALPNProtocols: ["h2"],
      secureContext: this.context,
    });
  }
}

function readContext(tls: Tls): SecureContext {
  const ca = read("ca", tls.ca);
  if (tls.cert === undefined && tls.key === undefined) return createContext({ ca });
  for (const name of ["cert", "key"] as const) {
    if (tls[name] === undefined) {
      throw refusal(name, `tls.${name} is missing: to show a certificate, set tls.cert and tls.key`);
    }
  }
  return createContext({ ca, cert: read("cert", tls.cert ?? ""), key: read("key", tls.key ?? "") });
}

function createContext(files: { ca: Buffer; cert?: Buffer; key?: Buffer }): SecureContext {
  try {
    return createSecureContext(files);
  } catch (error) {
    const message = `the files of tls are not in PEM, or tls.key is not the key of tls.cert: ${String(error)}`;
    throw refusal("key", message);
  }
}

function read(name: string, path: string): Buffer {
  try {
    return readFileSync(path);
  } catch (error) {
    throw refusal(name, `tls.${name}: cannot read ${path}: ${String(error)}`);
  }
}

function refusal(name: string, message: string): LmkvError {
  return new LmkvError(message, "INTERNAL", "CONFIG_ERROR", { key: `tls.${name}` });
}
