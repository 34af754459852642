/** The connection to one coordinator: its services, calls, and the mapping of errors. */

import { type CallOptions, type Client, Code, ConnectError, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { codeName, fromDetails, LmkvError } from "./errors.js";
import { Operations } from "./gen/google/longrunning/operations_pb.js";
import { CacheService } from "./gen/lmkv/v1/cache_service_pb.js";
import { RegistryService } from "./gen/lmkv/v1/registry_service_pb.js";
import { type Tls, TlsConnector } from "./tls.js";

/** The services' own limit. */
export const MAX_MESSAGE_BYTES = 1 << 20;
const KEEPALIVE = { pingIntervalMs: 10_000, pingTimeoutMs: 5_000 };
const PAGE_SIZE = 1000;
/** A coordinator that never ends its list is broken. */
const MAX_PAGES = 100;

/** What a call ends with where the coordinator itself says nothing; `Aborted` is a connection that broke. */
const NO_ANSWER: readonly Code[] = [Code.Unavailable, Code.DeadlineExceeded, Code.Canceled, Code.Aborted];

interface Page {
  nextPageToken: string;
}

export interface ConnectionOptions {
  /** Timeout of a call. */
  timeoutSeconds: number;
  tls: Tls | undefined;
  token: Token | undefined;
}

/** The token of the caller, or a function that returns it for each call, so that tokens can be rotated. */
export type Token = string | (() => string);

export class Connection {
  readonly cache: Client<typeof CacheService>;
  readonly registry: Client<typeof RegistryService>;
  readonly operations: Client<typeof Operations>;
  readonly timeoutSeconds: number;
  private readonly closing = new AbortController();

  /** It connects when first used, and again after a loss. Throws `CONFIG_ERROR` if the files of `tls` cannot be used. */
  constructor(
    readonly address: string,
    { timeoutSeconds, tls, token }: ConnectionOptions,
  ) {
    this.timeoutSeconds = timeoutSeconds;
    const connector = tls && new TlsConnector(tls);
    const transport = createGrpcTransport({
      baseUrl: `${tls ? "https" : "http"}://${address}`,
      readMaxBytes: MAX_MESSAGE_BYTES,
      writeMaxBytes: MAX_MESSAGE_BYTES,
      ...KEEPALIVE,
      ...(connector && { nodeOptions: { createConnection: (authority: URL) => connector.connect(authority) } }),
      interceptors: token === undefined ? [] : [showing(token)],
    });
    this.cache = createClient(CacheService, transport);
    this.registry = createClient(RegistryService, transport);
    this.operations = createClient(Operations, transport);
  }

  /** Ends calls that still run, and with the last of them the connection. May be repeated. */
  close(): void {
    this.closing.abort();
  }

  /** The options of a call that lasts until it is ended: by this signal, or by `close`. */
  until(signal: AbortSignal): CallOptions {
    return { signal: AbortSignal.any([signal, this.closing.signal]) };
  }

  /**
   * The answer to one call. Throws the coordinator's own errors, and `UNREACHABLE` if there is no answer.
   *
   * `extraSeconds` is how long the coordinator was asked to hold the answer back.
   */
  async call<Response>(method: (options: CallOptions) => Promise<Response>, extraSeconds = 0): Promise<Response> {
    try {
      const timeoutMs = Math.ceil((this.timeoutSeconds + extraSeconds) * 1000); // gRPC takes whole ones
      return await method({ timeoutMs, signal: this.closing.signal });
    } catch (error) {
      throw this.meaningOf(error);
    }
  }

  /** The pages that a List call answers, one after the other. Throws as `call` does. */
  async *pages<Response extends Page>(
    method: (page: { pageSize: number; pageToken: string }, options: CallOptions) => Promise<Response>,
  ): AsyncGenerator<Response, void, void> {
    let pageToken = "";
    for (let count = 0; count < MAX_PAGES; count++) {
      const page = await this.call((options) => method({ pageSize: PAGE_SIZE, pageToken }, options));
      yield page;
      pageToken = page.nextPageToken;
      if (!pageToken) return;
    }
    const message = `the coordinator at ${this.address} lists without end`;
    throw new LmkvError(message, "INTERNAL", "INTERNAL", { address: this.address });
  }

  /** What a call failed with, which says where the coordinator was looked for if it did not answer. */
  meaningOf(thrown: unknown): LmkvError {
    if (this.closing.signal.aborted) {
      return new LmkvError("this coordinator was closed; make another one", "CANCELLED", "CLOSED");
    }
    const error = ConnectError.from(thrown);
    const refusal = fromDetails(error);
    if (refusal) return refusal;
    if (NO_ANSWER.includes(error.code) || isOfTheSystem(error.cause)) return this.unreachable(error.rawMessage);
    const code = codeName(error.code);
    return new LmkvError(`${code}: ${error.rawMessage}`, code, "INTERNAL");
  }

  /** Whether an error says that this coordinator does not answer. */
  isSilent(error: unknown): error is LmkvError {
    return error instanceof LmkvError && error.reason === "UNREACHABLE" && error.metadata.address === this.address;
  }

  /** The error that says that no coordinator responds. */
  unreachable(why: string): LmkvError {
    const message = `no coordinator responds at ${this.address}: ${why}`;
    return new LmkvError(message, "UNAVAILABLE", "UNREACHABLE", { address: this.address });
  }
}

/** Adds the token to a call. */
function showing(token: Token): Interceptor {
  return (next) => async (request) => {
    request.header.set("authorization", `Bearer ${typeof token === "string" ? token : token()}`);
    return await next(request);
  };
}

/** Whether Node.js itself threw it: a socket that broke, or TLS that the two ends do not agree on. */
function isOfTheSystem(cause: unknown): boolean {
  return cause instanceof Error && "code" in cause;
}
