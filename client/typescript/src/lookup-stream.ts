/**
 * Lookups on one stream, for clients that look up often: they are cheaper than single calls.
 *
 * Lookups that arrive while a message is being sent are batched into the next one.
 */

import { create, type MessageInitShape } from "@bufbuild/protobuf";

import { type Chunks, promptFields } from "./chunks.js";
import { type Connection, MAX_MESSAGE_BYTES } from "./connection.js";
import type { Connections } from "./connections.js";
import { fromStatus, LmkvError } from "./errors.js";
import {
  type LookupRequest,
  LookupRequestSchema,
  type LookupResponse,
  type LookupResult,
  type LookupStreamRequestSchema,
} from "./gen/lmkv/v1/cache_service_pb.js";

/** Maximum number of lookups in flight; further ones are queued. */
const MAX_IN_FLIGHT = 256;
/** Maximum size of a batch. */
const MERGED_BYTES = MAX_MESSAGE_BYTES / 2;

/** A stream of lookups. It opens at the first lookup, and reopens after a loss at a coordinator that answers. */
export class LookupStream implements Disposable {
  private line: Line | undefined;

  /** `Coordinator.lookupStream` makes it. */
  constructor(private readonly connections: Connections) {}

  /**
   * As `Coordinator.lookup`. Several may wait at a time.
   *
   * A question that is longer than a message may be is refused here, before it is sent: a coordinator would end the
   * call, and with it the lookups of all who share the stream.
   */
  async lookup(chunks: Chunks): Promise<LookupResponse> {
    const request = create(LookupRequestSchema, promptFields(chunks));
    const connection = this.connections.current;
    if (!this.line || this.line.ended || this.line.connection !== connection) {
      this.line?.close();
      this.line = new Line(connection, this.connections);
    }
    const question = new Question(request);
    const timer = setTimeout(() => {
      this.connections.failed(connection);
      question.reject(connection.unreachable("no answer in time"));
    }, connection.timeoutSeconds * 1000);
    try {
      this.line.ask(question);
      return await question.answer;
    } finally {
      clearTimeout(timer);
    }
  }

  /** Ends the call; lookups still waiting throw `UNREACHABLE`. May be repeated. */
  close(): void {
    this.line?.close();
    this.line = undefined;
  }

  [Symbol.dispose](): void {
    this.close();
  }
}

/** One lookup until it is answered, refused or given up. */
class Question {
  readonly answer: Promise<LookupResponse>;
  isOver = false;
  private settle!: { resolve: (response: LookupResponse) => void; reject: (error: LmkvError) => void };

  constructor(readonly request: LookupRequest) {
    this.answer = new Promise((resolve, reject) => {
      this.settle = { resolve, reject };
    });
  }

  /** About how much of a message it takes, rather more than less. */
  get sizeBytes(): number {
    const prompt = this.request.prompt?.prompt;
    if (prompt?.case === "keys") return 128 + prompt.value.chunkKeys.reduce((sum, key) => sum + key.length + 4, 0);
    if (prompt?.case !== "tokens") return 64;
    const { tokenIds, modelName, cacheSalt, loraName } = prompt.value;
    return 64 + 5 * tokenIds.length + 3 * (modelName.length + cacheSalt.length + loraName.length);
  }

  resolve(result: LookupResult["result"]): void {
    this.isOver = true;
    if (result.case === "response") this.settle.resolve(result.value);
    else if (result.case === "error") this.settle.reject(fromStatus(result.value));
    else this.settle.reject(new LmkvError("the coordinator answered with nothing", "INTERNAL", "INTERNAL"));
  }

  reject(error: LmkvError): void {
    this.isOver = true;
    this.settle.reject(error);
  }
}

/** One call, from its opening to its end, and who waits for an answer: they come in the order of the questions. */
class Line {
  ended = false;
  private readonly ending = new AbortController();
  private unsent: Question[] = [];
  private waiting: Question[] = [];
  private wake: () => void = () => undefined;

  constructor(
    readonly connection: Connection,
    private readonly connections: Connections,
  ) {
    void this.read();
  }

  ask(question: Question): void {
    this.unsent.push(question);
    this.wake();
  }

  close(): void {
    this.ending.abort();
  }

  /** Each has all that is asked by then: the next one is taken when the last is sent. */
  private async *messages(): AsyncGenerator<MessageInitShape<typeof LookupStreamRequestSchema>, void, void> {
    while (!this.ended) {
      const requests = this.take();
      if (requests.length) {
        yield { requests };
      } else {
        await new Promise<void>((resolve) => (this.wake = resolve));
      }
    }
  }

  /** The questions of the next message. */
  private take(): LookupRequest[] {
    this.unsent = this.unsent.filter((question) => !question.isOver); // their callers have given up
    const taken: Question[] = [];
    let sizeBytes = 0;
    for (const question of this.unsent) {
      sizeBytes += question.sizeBytes;
      const isFull = taken.length > 0 && sizeBytes > MERGED_BYTES;
      if (isFull || this.waiting.length + taken.length === MAX_IN_FLIGHT) break;
      taken.push(question);
    }
    this.unsent.splice(0, taken.length);
    this.waiting.push(...taken);
    return taken.map((question) => question.request);
  }

  private async read(): Promise<void> {
    let end = this.connection.unreachable("it ended the lookup stream");
    try {
      const options = this.connection.until(this.ending.signal);
      for await (const message of this.connection.cache.lookupStream(this.messages(), options)) {
        for (const { result } of message.results) this.waiting.shift()?.resolve(result);
        this.wake(); // there is room for more
      }
    } catch (error) {
      end = this.connection.meaningOf(error);
    } finally {
      this.ended = true;
      this.wake();
      this.ending.abort();
      if (this.connection.isSilent(end)) this.connections.failed(this.connection);
      for (const question of [...this.waiting, ...this.unsent]) question.reject(end);
    }
  }
}
